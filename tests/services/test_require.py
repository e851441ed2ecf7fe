"""`Require`: a metric that has not reached its value in time makes the process fail with status 4."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from crashing import check_crashes, collecting, run

import everstep
import warm
from everstep import Every
from everstep.errors import ConfigError, GuardStop
from everstep.services import Require
from everstep.testing import check_service
from tiny_runs import Boom, Tiny, boom_at

ACCURACIES = [0.5, 0.8, 0.6]


@pytest.mark.campaign("long", gate="share")
def test_it_is_reached_by_any_value_before_the_deadline(tmp_path: Path) -> None:
    make = lambda: [Require("valid_accuracy", 0.8, epoch=3)]  # noqa: E731
    tail = collecting("valid_accuracy", ACCURACIES)
    assert check_crashes(tmp_path, make, tail, max_epoch=4).loop.ending.reason == "max_epoch 4 is reached"


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("max_epoch", [3, 4])
def test_it_is_not_reached(tmp_path: Path, max_epoch: int) -> None:
    """Also where a limit ends the run at that very boundary."""
    make = lambda: [Require("valid_accuracy", 0.9, epoch=3)]  # noqa: E731
    tail = collecting("valid_accuracy", ACCURACIES)
    tiny = check_crashes(tmp_path, make, tail, max_epoch=max_epoch)
    assert tiny.loop.ending.reason == (
        "requirement not met: valid_accuracy has not reached 0.9 by epoch 3, its best is 0.8"
    )
    assert tiny.loop.ending.epoch == 3


PROGRAM = """
import sys
import everstep
from everstep.services import Require

required = Require("loss", float(sys.argv[1]), step=4, every=everstep.Every(steps=2))
with everstep.Supervisor("run", services=[required], max_step=6, on_change=sys.argv[2]) as sv:
    sv.stream(None)
    while not sv.should_stop():
        sv.advance(loss=1.0)
"""


def test_exit_status_4_again_and_again_until_the_requirement_changes(tmp_path: Path) -> None:
    def status(goal: str, on_change: str = "error") -> int:
        command = [sys.executable, "-c", PROGRAM, goal, on_change]
        return warm.run(command, cwd=tmp_path, capture_output=True).returncode

    assert [status("0.5"), status("0.5"), status("1.0", "override")] == [4, 4, 0]


def test_no_value_at_all(tmp_path: Path) -> None:
    tiny = run(tmp_path, [Require("nothing", 0.5, "min", step=2)], max_epoch=1)
    assert tiny.loop.ending.reason.endswith("by step 2, it has no value")


@pytest.mark.campaign("long")
def test_a_run_that_is_over_before_fails_and_goes_on_with_a_raised_limit(tmp_path: Path) -> None:
    """Its end is its own: an early stop, a limit."""

    def start(max_epoch: int, stopped: bool = False) -> str:
        tail = collecting("valid_accuracy", ACCURACIES)
        patience = [everstep.EarlyStop("valid_accuracy", threshold=0.7)] if stopped else []
        tiny = Tiny(
            tmp_path / str(stopped),
            max_epoch=max_epoch,
            services=[Require("valid_accuracy", 0.9, epoch=9), *patience],
        )
        with pytest.raises(GuardStop) as raised:
            tiny.train(tail=tail)
        assert raised.value.code == 4
        assert tiny.loop.ending.finished
        assert raised.value.reason == tiny.lines[-1]
        return raised.value.reason

    unmet = "requirement not met: valid_accuracy has not reached 0.9, its best is"
    assert start(1) == start(1) == f"{unmet} 0.5 (max_epoch 1 is reached)"
    assert start(3) == f"{unmet} 0.8 (max_epoch 3 is reached)"
    assert start(5, stopped=True).startswith(f"{unmet} 0.8 (early stop: ")


def test_a_run_that_is_left_is_not_judged(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        run(tmp_path, [Require("loss", 0.0, "min", epoch=9)], inside=boom_at(3), max_epoch=1)


def test_what_came_after_the_last_look_counts(tmp_path: Path) -> None:
    with everstep.Supervisor(tmp_path, services=[Require("loss", 0.5, step=9)], max_step=2) as sv:
        sv.stream(None)
        while not sv.should_stop():
            sv.advance(loss=0.5)
    assert sv.ending.finished


@pytest.mark.campaign("long")
def test_it_keeps_the_laws() -> None:
    check_service(lambda: Require("valid_loss", 0.6, epoch=2))
    check_service(lambda: Require("loss", 0.0, "max", step=4, every=Every(steps=1)))


@pytest.mark.parametrize("arguments", [{}, {"step": 1, "epoch": 1}, {"step": 0}])
def test_misuse(arguments: Any) -> None:
    with pytest.raises(ConfigError, match=r"give (step= or epoch=|an integer)"):
        Require("loss", 0.5, **arguments)
