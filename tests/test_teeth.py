"""`make test` has teeth: faults that are planted in a copy of the library die by tests of the short tier."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import tiers

TESTS = Path(__file__).parent
LIBRARY = TESTS.parent / "src" / "everstep"


class Edit(NamedTuple):
    """One change of a statement, which is found by its text, wherever in the library it stands.

    Attributes:
        statement: pattern of its first line, as `ast.unparse` writes it.
        to: what takes its place; "" for nothing.
        beside: pattern of a statement in the same block; `to` takes the place before that one.
        behind: the same, and the place behind that one.
    """

    statement: str
    to: str
    beside: str = ""
    behind: str = ""


class Fault(NamedTuple):
    """Edits that are made together, and the test that must fail by them."""

    edits: tuple[Edit, ...]
    test: str


SAVE = "supervisor/test_order_of_a_save.py::test_rows_then_the_checkpoint_then_retention"
COMMIT = r"committed = self\._write_whole\("
FAULTS = {
    "no fsync of the folder": Fault(
        (Edit(r"files\.fsync_folder\(target\.parent\)", ""),),
        "checkpoint/test_checkpoint_crash.py::test_order_of_operations_data_then_rename_then_folder",
    ),
    "retention before the commit": Fault(
        (
            Edit(
                r"if self\.\w+\.writer:\n\s+self\._opening\.store\.retain", "=", beside=r"with nullcontext\("
            ),
        ),
        SAVE,
    ),
    "a checkpoint before its rows": Fault((Edit(r"self\._journal\.fsync_only\(snapshot", ""),), SAVE),
    "best weights named before they are there": Fault(
        (Edit(r"if self\.\w+\.writer:\n\s+self\._opening\.lock", "=", behind=COMMIT),),
        SAVE,
    ),
    "random state before the iterator": Fault(
        (
            Edit(r"if self\.\w+\.random is not None:", "=", beside=r"self\.\w+\.open_bound\(\)"),
            Edit(
                r"with isolated\(\):\n\s+cursor = ",
                "cursor = self.stream.open(self.name, pass_index, position, seed=self._seed)",
            ),
        ),
        "laws/test_law1_any_step.py::test_crashed_anywhere",
    ),
    "a dropped generator": Fault(
        (Edit(r"backends\.get\(name\)\.set_random_state\(state\)", "pass"),),
        "state/test_random_state.py",
    ),
    "no check of checksums": Fault(
        (Edit(r"if found\.hexdigest\(\) != record", ""),),
        "checkpoint/test_checkpoint_damage.py",
    ),
    "a position that is off by one": Fault(
        (Edit(r"self\.done = self\._count$", "self.done = self._count + 1"),),
        "data/test_arrays.py",
    ),
    "no state of the optimizer": Fault(
        (Edit(r"self\.optimizer\.load_state_dict\(\{key: part", ""),),
        "backends/test_torch_entries.py",
    ),
    "a row twice": Fault(
        (
            Edit(
                r"self\._journal\.append\(block\)", "self._journal.append(block); self._journal.append(block)"
            ),
        ),
        "loop/test_loop_leaving.py::test_head_metrics_are_not_written_twice_and_tails_write_the_same_keys",
    ),
}


def blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


def where(block: list[ast.stmt], pattern: str) -> list[int]:
    return [at for at, statement in enumerate(block) if re.match(pattern, ast.unparse(statement))]


def plant(library: Path, edit: Edit) -> None:
    """Make the edit in the one block of the library that has its statements."""
    wanted = [pattern for pattern in (edit.statement, edit.beside, edit.behind) if pattern]
    found = []
    for path in sorted(library.rglob("*.py")):
        tree = ast.parse(path.read_text())
        found += [(path, tree, block) for block in blocks(tree) if all(where(block, each) for each in wanted)]
    assert len(found) == 1, f"{edit.statement} stands at {len(found)} places: mend this edit"
    path, tree, block = found[0]
    (at,) = where(block, edit.statement)
    old = block.pop(at)
    new = [old] if edit.to == "=" else ast.parse(edit.to or "pass").body
    if place := edit.beside or edit.behind:
        at = where(block, place)[0] + bool(edit.behind)
    block[at:at] = new
    path.write_text(ast.unparse(tree))


def with_library(library: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """Run these tests, as far as `make test` has them, with the library that lies there."""
    (short,) = re.findall(r'-m "(not [^"]+)"', (TESTS.parent / "Makefile").read_text())
    options = ["-q", "-x", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", short]
    program = f"import everstep, pytest, sys; assert everstep.__file__.startswith({str(library)!r}); "
    return subprocess.run(
        [sys.executable, "-c", program + "sys.exit(pytest.main(sys.argv[1:]))", *options, *tests],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(library.parent)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(LIBRARY, tmp_path / "everstep", ignore=shutil.ignore_patterns("__pycache__")))


def test_without_a_fault_they_pass(copy: Path) -> None:
    done = with_library(copy, *{fault.test for fault in FAULTS.values()})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_dies_in_make_test(copy: Path, name: str) -> None:
    fault = FAULTS[name]
    for edit in fault.edits:
        plant(copy, edit)
    done = with_library(copy, fault.test)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"FAILED {fault.test}" in done.stdout


@pytest.mark.parametrize("name", FAULTS)
def test_what_kills_it_runs_every_day(name: str) -> None:
    path, _, test = FAULTS[name].test.partition("::")
    assert test not in tiers.TIERS.get(path, {})
