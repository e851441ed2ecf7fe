"""Pairs of programs that differ by one subtle fault in the middle: `everstep diverge` names where.

The programs in `plants/`, and what is expected of them, were written by somebody who had not read the code of
diverge.  A program is sound; where its line "# fault: ..." is code it is the other one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from test_replay import start

HERE = Path(__file__).parent


class Planted(NamedTuple):
    """Where a fault first shows: in this step, in this component."""

    step: int
    component: str


PLANTS = {
    "late_decay": Planted(21, "optimizer"),
    "one_ulp": Planted(19, "weights"),
    "evaluating": Planted(14, "loss"),
}


def parted(name: str, *fault: str) -> tuple[dict[str, Any], str]:
    """Train the sound and the faulty program, and let diverge find where they part.

    Args:
        fault: text of the program, and what takes its place; else its planted fault.
    """
    text = (HERE / "plants" / f"{name}.py").read_text()
    old, new = fault or ("# fault: ", "")
    assert text.count(old) == 1
    for letter, program in (("a", text), ("b", text.replace(old, new))):
        Path(f"{letter}.py").write_text(program)
        start(f"{letter}.py", letter)
    told = start("-m", "everstep", "diverge", "a", "b", "--json", "found.json", status=1)
    return json.loads(Path("found.json").read_text()), told


@pytest.mark.campaign("long")
@pytest.mark.parametrize("name", PLANTS)
def test_a_strangers_fault_is_named(name: str) -> None:
    found, told = parted(name)
    assert (found["step"], found["component"]) == PLANTS[name], told


BACKWARD = "critic_loss.backward()"


@pytest.mark.campaign("long")
@pytest.mark.parametrize(
    ("fault", "component"),
    [
        (f"{BACKWARD}; [p.grad.mul_(1 - (step == 21) / 4) for p in critic.parameters()]", "gradient"),
        (f"critic_loss = critic_loss * (1 + (step == 21) / 4); {BACKWARD}", "loss"),
    ],
)
def test_of_two_updates_in_a_step_the_first_that_differs_is_named(fault: str, component: str) -> None:
    """Both change the loss of the second model in the same step."""
    found, told = parted("late_decay", BACKWARD, fault)
    assert (found["step"], found["component"]) == (21, component), told
