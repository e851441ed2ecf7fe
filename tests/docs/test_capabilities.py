"""docs/capabilities.md names tests that exist and run."""

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
    for line in (ROOT / "docs" / "capabilities.md").read_text().splitlines()
    if re.match(r"\| (law )?\d+ \|", line)
}


@cache
def functions_in(path: Path) -> dict[str, str]:
    """The test functions of a file, with the source of their decorators and bodies."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            found[node.name] = ast.unparse(node)
    return found


@pytest.mark.parametrize("number", ROWS)
def test_the_rows_tests_exist_and_run(number: str) -> None:
    assert ROWS[number], "a row without a test"
    for each in ROWS[number]:
        path, _, name = each.partition("::")
        source = functions_in(TESTS / path).get(name)
        assert source is not None, f"there is no {each}"
        assert not re.search(r"mark\.(skip|xfail)|pytest\.(skip|xfail)", source), f"{each} does not run"
