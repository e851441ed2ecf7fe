"""tests/capabilities.md names tests that exist and run, in the gate or in the campaign."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TESTS = ROOT / "tests"

ROWS = {
    line.split("|")[1].strip(): re.findall(r"`([\w/]+\.py::\w+)`", line)
    for line in (TESTS / "capabilities.md").read_text().splitlines()
    if re.match(r"\| (law )?\d+ \|", line)
}


@cache
def functions_in(path: str) -> dict[str, str]:
    """Each test function of the file, with its source and decorators."""
    return {
        node.name: ast.unparse(node)
        for node in ast.walk(ast.parse((TESTS / path).read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def mapped(number: str) -> dict[str, str]:
    found = {}
    for each in ROWS[number]:
        path, _, name = each.partition("::")
        functions = functions_in(path)
        assert name in functions, f"there is no {each}"
        found[each] = functions[name]
    return found


@pytest.mark.parametrize("number", ROWS)
def test_the_rows_tests_exist_and_run(number: str) -> None:
    assert ROWS[number], "a row without a test"
    for each, source in mapped(number).items():
        assert not re.search(r"mark\.(skip|xfail)|pytest\.(skip|xfail)", source), f"{each} does not run"


@pytest.mark.parametrize("number", [number for number in ROWS if number.startswith("law")])
def test_a_law_has_its_place_in_the_gate(number: str) -> None:
    campaign_only = re.compile(r"mark\.campaign\('\w+'\)")
    assert any(not campaign_only.search(source) for source in mapped(number).values())
