"""The gate depends on nothing but the commit: what a parser can see of the rules in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

import gate

TESTS = Path(__file__).parent

LUCK = {
    r"\btime\.sleep\(": "sleeps: wait for an event",
    r"\burandom\(|\bSystemRandom\(|\bdefault_rng\(\)|\brandom\.seed\(\)|\bRandom\(\)": "draws without a seed",
    r"\btimeout=(\d|[1-9]\d|1[01]\d)\b(?!\.\w)": "has a limit under 120 s",
    r"\b(wait|communicate|join)\((\d|[1-9]\d|1[01]\d)(\.\d+)?\)": "has a limit under 120 s",
    r"\b(date\.today|datetime\.now|time\.time|time\.monotonic|perf_counter)\(": "looks at a clock",
}


def gate_source(path: Path) -> str:
    """The source of a file of tests, without the functions that only the campaign runs."""
    lines = path.read_text().splitlines()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.FunctionDef) and any(_campaign_only(each) for each in node.decorator_list):
            first = min(each.lineno for each in node.decorator_list)
            lines[first - 1 : node.end_lineno] = [""] * (node.end_lineno - first + 1)  # type: ignore[operator]
    return "\n".join(lines)


def _campaign_only(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).startswith("pytest.mark.campaign(") and "gate=" not in ast.unparse(
        decorator
    )


def is_campaign(path: Path) -> bool:
    return re.search(r"^pytestmark = \[?pytest\.mark\.campaign", path.read_text(), re.M) is not None


def test_a_file_has_one_list_of_marks() -> None:
    """The second would take the place of the first, and with it of the tier."""
    twice = [path.name for path in TESTS.rglob("*.py") if path.read_text().count("\npytestmark = ") > 1]
    assert twice == []


def test_no_two_files_of_tests_have_one_name() -> None:
    """Two files of a name cannot be imported side by side: each runs alone, and not in the whole suite."""
    names = Counter(path.name for path in TESTS.rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(("n", "of", "numbers"), [(1, 1, [0]), (2, 7, [0, 3]), (9, 3, [0, 1, 2]), (0, 4, [])])
def test_cases_of_the_gate_are_spread(n: int, of: int, numbers: list[int]) -> None:
    assert gate.spread(n, of) == numbers


def test_each_law_has_a_test_in_the_gate() -> None:
    missing = []
    for path in TESTS.glob("laws/test_law*.py"):
        if is_campaign(path) or not re.search(r"^def test_", gate_source(path), re.M):
            missing.append(path.name)
    assert missing == []
