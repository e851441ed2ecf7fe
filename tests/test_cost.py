"""A quiet step and a saving boundary cost no more than tests/cost.json says: counts, not times.

A machine that is busy changes no count, so an operation, a wait or a reading of the clock that somebody adds
is seen on any machine.  The program that counts is tests/cost_program.py; it says what each number is.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from cost_program import NUMBERS, PLANTS

UPDATE = "python tests/cost_program.py --update"
SLACK = {
    "quiet step": {"blocks kept": 6, "bytes at most": 256},
    "boundary": {"python calls": 20, "blocks kept": 400, "bytes at most": 64 << 10},
}
"""Differences between versions of Python; in a boundary also by the clock, and by the writer's thread."""


@pytest.fixture(scope="module")
def counted() -> Any:
    program = NUMBERS.with_name("cost_program.py")
    done = subprocess.run(
        [sys.executable, str(program), "--plants"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def dearer(now: dict[str, int], before: dict[str, int], what: str) -> dict[str, str]:
    """The counts that are higher than they were."""
    return {
        name: f"{before[name]} -> {number}"
        for name, number in now.items()
        if number > before[name] + SLACK[what].get(name, 0)
    }


@pytest.mark.campaign("machine")
@pytest.mark.parametrize("what", SLACK)
def test_nothing_costs_more_than_it_did(counted: Any, what: str) -> None:
    found = dearer(counted["as it is"][what], json.loads(NUMBERS.read_text())[what], what)
    assert not found, f"a {what} costs more: {found}. Where that is worth its price, say why and run {UPDATE}"


@pytest.mark.parametrize("what", SLACK)
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_cost_is_seen(counted: Any, name: str, what: str) -> None:
    assert PLANTS[name].shows in dearer(counted[name][what], counted["as it is"][what], what)
