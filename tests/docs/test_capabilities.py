"""docs/capabilities.md names tests that exist and run, in `make test` or in `make test-all`."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent.parent
TESTS = ROOT / "tests"

ROWS = {
    line.split("|")[1].strip(): re.findall(r"`([\w/]+\.py::\w+)`", line)
    for line in (ROOT / "docs" / "capabilities.md").read_text().splitlines()
    if re.match(r"\| (law )?\d+ \|", line)
}


class Found(NamedTuple):
    """A test function: the marks of all of it, and its source with the decorators."""

    marks: set[str]
    source: str


@cache
def functions_in(path: Path) -> dict[str, Found]:
    tree = ast.parse(path.read_text())
    of_file = [ast.unparse(node) for node in tree.body if ast.unparse(node).startswith("pytestmark")]
    return {
        node.name: Found(marks(*of_file, *map(ast.unparse, node.decorator_list)), ast.unparse(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def marks(*sources: str) -> set[str]:
    """Those that are set at once, not by a value of `parametrize`."""
    return {
        mark for source in sources if "param(" not in source for mark in re.findall(r"mark\.(\w+)", source)
    }


def mapped(number: str) -> dict[str, Found]:
    found = {}
    for each in ROWS[number]:
        path, _, name = each.partition("::")
        functions = functions_in(TESTS / path)
        assert name in functions, f"there is no {each}"
        found[each] = functions[name]
    return found


@pytest.mark.parametrize("number", ROWS)
def test_the_rows_tests_exist_and_run(number: str) -> None:
    assert ROWS[number], "a row without a test"
    for each, test in mapped(number).items():
        assert not re.search(r"mark\.(skip|xfail)|pytest\.(skip|xfail)", test.source), f"{each} does not run"
        assert "torture" not in test.marks, f"{each} runs in make torture alone"


@pytest.mark.parametrize("number", [number for number in ROWS if number.startswith("law")])
def test_a_law_has_its_place_in_make_test(number: str) -> None:
    assert any("long" not in test.marks for test in mapped(number).values())
