"""`EarlyStop` for each reason to stop; patience in evaluations stands in loop/test_loop_limits.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crashing import check_crashes, collecting

import everstep
from everstep import EarlyStop, Every
from everstep.errors import ConfigError


@pytest.mark.campaign("long", gate="share")
def test_patience_in_steps_counts_from_the_last_improvement(tmp_path: Path) -> None:
    tail = collecting("valid_loss", [1.0, 0.5, 0.6, 0.7, 0.8])
    tiny = check_crashes(tmp_path, lambda: [EarlyStop("valid_loss", patience_steps=9)], tail, max_epoch=9)
    assert tiny.loop.ending.reason == "early stop: valid_loss has not improved on 0.5 for 12 steps"
    assert tiny.loop.ending.step == 20


@pytest.mark.campaign("long", gate="share")
def test_a_threshold_stops_at_once(tmp_path: Path) -> None:
    tail = collecting("valid_accuracy", [0.2, 0.95, float("nan")])
    make = lambda: [EarlyStop("valid_accuracy", threshold=0.9)]  # noqa: E731
    tiny = check_crashes(tmp_path, make, tail, max_epoch=9)
    assert tiny.loop.ending.reason == "early stop: valid_accuracy has reached 0.9 with 0.95"
    assert tiny.loop.ending.epoch == 2


@pytest.mark.campaign("long", gate="share")
def test_a_threshold_waits_for_min_steps(tmp_path: Path) -> None:
    tail = collecting("valid_loss", [0.1])
    make = lambda: [EarlyStop("valid_loss", threshold=0.1, min_steps=9)]  # noqa: E731
    assert check_crashes(tmp_path, make, tail, max_epoch=9).loop.ending.step == 12


@pytest.mark.campaign("long", gate="share")
def test_what_is_not_better_than_the_baseline_is_no_improvement(tmp_path: Path) -> None:
    tail = collecting("valid_loss", [0.9, 0.8, 0.7])
    make = lambda: [EarlyStop("valid_loss", patience=3, baseline=0.5)]  # noqa: E731
    tiny = check_crashes(tmp_path, make, tail, max_epoch=9)
    assert tiny.loop.ending.reason == "early stop: valid_loss has not improved on 0.5 for 3 evaluations"
    assert tiny.loop.ending.epoch == 3


def test_without_any_value_steps_of_patience_do_not_pass(tmp_path: Path) -> None:
    with everstep.Supervisor(
        tmp_path / "run",
        services=[EarlyStop("loss", patience_steps=2, every=Every(steps=1))],
        max_step=9,
    ) as sv:
        sv.stream(None)
        while not sv.should_stop():
            if sv.step < 3:
                sv.advance()
            else:
                sv.advance(loss=1.0)
    assert sv.ending.reason == "early stop: loss has not improved on 1.0 for 2 steps"
    assert sv.step == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no reason to stop: give patience=, patience_steps= or threshold="),
        ({"patience": 0}, "patience=0: give an integer, 1 or more"),
        ({"patience_steps": 0}, "patience_steps=0"),
    ],
)
def test_misuse(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EarlyStop("loss", **arguments)
