"""NumPy's numbers are numbers, in every option; what is recorded of them are Python's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import everstep.display.cells
from everstep import At, EarlyStop, Every, services
from everstep.arguments import integer, number, plain
from everstep.errors import ConfigError

SIX: Any = np.int64(6)
HALF: Any = np.float32(0.5)

OPTIONS: dict[str, Callable[[], Any]] = {
    "Every steps": lambda: Every(steps=SIX).steps,
    "Every epochs": lambda: Every(epochs=SIX).epochs,
    "Every seconds": lambda: Every(seconds=SIX).seconds,
    "At": lambda: At(SIX).steps[0],
    "Checkpoints": lambda: everstep.Checkpoints(Every(steps=1), keep_last=SIX).retention.keep_last,
    "Best": lambda: everstep.Best("loss", keep=SIX).keep,
    "EarlyStop": lambda: EarlyStop("loss", patience=SIX).patience,
    "StopAfter": lambda: everstep.services.StopAfter(steps=SIX).steps,
    "Evaluate": lambda: everstep.Evaluate(num_steps=SIX).num_steps,
    "Annealing": lambda: services.Annealing(1.0, 0.5, every=SIX).every,
    "Require": lambda: services.Require("loss", 1.0, epoch=SIX).epoch,
    "arrays": lambda: everstep.data.arrays(np.zeros(9), batch_size=SIX).describe(0)["batch_size"],
    "arrays, seed": lambda: everstep.data.arrays(
        np.zeros(9), batch_size=2, shuffle=True, seed=SIX
    ).describe(0)["seed"],
}  # fmt: skip


@pytest.mark.parametrize("made", OPTIONS.values(), ids=OPTIONS)
def test_an_option_takes_them(made: Callable[[], Any]) -> None:
    assert made() == 6 and type(made()) is int


def test_what_is_a_number_and_what_is_none() -> None:
    for six in (np.int8(6), np.uint64(6), 6):
        assert integer("n", six) == 6 and type(integer("n", six)) is int
    assert number("n", HALF) == 0.5 and type(number("n", HALF)) is float
    assert everstep.display.cells.with_leaves({"a": [SIX, (HALF,), "6"]}, plain) == {"a": [6, [0.5], "6"]}
    for wrong in (np.float64(6), np.bool_(True), True, np.array(6), "6"):
        with pytest.raises(ConfigError, match="an integer"):
            integer("n", wrong)
    for wrong in (np.float32("nan"), np.float32(-1), np.bool_(True)):
        with pytest.raises(ConfigError, match="positive number"):
            number("n", wrong)
