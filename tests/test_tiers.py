"""The page of the tiers names tests that exist, each kind of proof stays in `make test`, no test is lost."""

from __future__ import annotations

import ast
import math
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import tiers
import warm

TESTS = Path(__file__).parent
LAW_FILES = sorted(str(path.relative_to(TESTS)) for path in TESTS.glob("laws/test_*.py"))


@cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((TESTS / path).read_text())
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return {name for name in found if name.startswith("test_")}


def in_make_test(path: str, name: str) -> bool:
    return name not in tiers.TORTURE.get(path, ()) and tiers.TIERS.get(path, {}).get(name) != tiers.NONE


def test_no_two_files_of_tests_have_one_name() -> None:
    """Two files of a name cannot be imported side by side: each runs alone, and not in the whole suite."""
    names = Counter(path.name for path in TESTS.rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_every_name_is_a_test() -> None:
    named = [(path, name) for table in (tiers.TIERS, tiers.TORTURE) for path in table for name in table[path]]
    assert [f"{path}::{name}" for path, name in named if name not in names_in(path)] == []
    assert not any(
        name in tiers.TIERS.get(path, {}) for path in tiers.TORTURE for name in tiers.TORTURE[path]
    )
    for beginning in tiers.TOGETHER:
        assert list(TESTS.glob(f"{beginning}*.py"))
        assert not any(path.startswith(beginning) for path in (*tiers.TIERS, *tiers.TORTURE))


@pytest.mark.parametrize("kind", tiers.PROOFS)
def test_a_kind_of_proof_is_in_make_test(kind: str) -> None:
    path, _, name = tiers.PROOFS[kind].partition("::")
    assert name in names_in(path) and in_make_test(path, name)


@pytest.mark.parametrize("path", [path for path in LAW_FILES if path != "laws/test_torture.py"])
def test_a_file_of_a_law_is_in_make_test(path: str) -> None:
    assert any(in_make_test(path, name) for name in names_in(path))


def test_marks_of_tiers_stand_on_their_page_alone() -> None:
    mark = re.compile(r"mark\.(long|in_turn|torture)\b")
    assert [path for path in TESTS.rglob("*.py") if mark.search(path.read_text())] == []


@pytest.mark.parametrize(("n", "of"), [(1, 1), (1, 7), (3, 7), (6, 7), (7, 7), (9, 7), (8, 42)])
def test_every_case_has_its_turn(n: int, of: int, monkeypatch: pytest.MonkeyPatch) -> None:
    days = []
    for day in range(100, 100 + math.ceil(of / n)):
        monkeypatch.setenv("EVERSTEP_TURN", str(day))
        days.append(tiers.turns(n, of, "a test"))
    assert all(len(day) == min(n, of) for day in days)
    assert set().union(*days) == set(range(of))


def test_a_loop_goes_over_its_share_or_over_all() -> None:
    assert tiers.share("abcdef", 2) == list("abcdef")
    tiers.share_for("a test")
    try:
        some = tiers.share("abcdef", 2)
    finally:
        tiers.share_for(None)
    assert len(some) == 2 and some == sorted(some) and set(some) < set("abcdef")


def test_a_test_with_a_share_gets_it(request: pytest.FixtureRequest) -> None:
    """And not all cases: pytest once left out the fixture that counts them, and nothing failed."""
    found = tiers.share(range(10), 3)
    assert len(found) == (3 if request.node.callspec.params["extent"] == tiers.SHARE else 10)


def test_what_make_test_leaves_out_make_test_all_adds() -> None:
    """The two expressions of the Makefile, over files of each kind."""
    short, rest = re.findall(r'-m "([^"]+)" \$\(ARGS\)', (TESTS.parent / "Makefile").read_text())
    files = (
        "record/test_journal_kills.py",
        "services/test_early_stop.py",
        "drill/test_drill.py",
        "faults/test_faults_disk.py",
    )

    def collected(expression: str) -> set[str]:
        command = ["-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-m", expression]
        done = warm.run(
            [sys.executable, *command, *(str(TESTS / file) for file in files)],
            cwd=TESTS.parent,
            stdout=subprocess.PIPE,
            text=True,
        )
        return {line for line in done.stdout.splitlines() if "::" in line}

    everything = collected("not torture")
    assert collected(short) | collected(rest) == everything
    counts = ((r"test_a_kill_at_any_operation.*", 5), (r"early_stop.*\[whole", 0), (r"test_fault_\d\d_", 5))
    for kind, in_short in counts:
        chosen = [name for name in collected(short) if re.search(kind, name)]
        assert len(chosen) == in_short < sum(bool(re.search(kind, name)) for name in everything)
