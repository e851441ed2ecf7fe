"""Rows of a metric, on their way from the collector to the journal, its readers and the index."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

_BETTER: dict[str, Literal["min", "max"]] = {"loss": "min", "acc": "max", "accuracy": "max"}
"""Word in the name of a metric -> which value is better."""
_DATA = {"train", "val", "valid", "validation", "dev", "test", "eval"}


class Block(NamedTuple):
    """Rows of one metric: columns of equal length, row i has key (epoch, steps[i], phase, name, seqs[i]).

    Attributes:
        epoch: epoch of the rows, from 1; 0 before the first epoch.
        phase: where the values were collected: "head" (in an epoch, before its first steps), "step",
            "tail" (in an epoch, after steps), "eval/SERVICE" (returned by a service); "epoch" for the
            means of an epoch's steps.
        name: the metric's name.
        wall: True if the values depend on the clock and do not count for equality.
        steps: the step of each row.
        values: float64 values; every bit is kept, also those of a NaN.
        counts: number of values folded into each row.
        seqs: ordinal of a row among rows of the same step.
    """

    epoch: int
    phase: str
    name: str
    wall: bool
    steps: list[int]
    values: list[float]
    counts: list[int]
    seqs: list[int]


def phases_and_names(text: str) -> Iterator[tuple[str, str]]:
    """Yield (phase, name) for each way to read "PHASE/NAME": either may have a "/" in it."""
    parts = text.split("/")
    for at in range(1, len(parts)):
        yield "/".join(parts[:at]), "/".join(parts[at:])


def better_when(metric: str) -> Literal["min", "max"] | None:
    """Return which value of a metric is better, by its name; None where the name does not tell.

    The word loss, acc or accuracy at the name's end decides, or before the name of data ("loss/val").
    """
    for part in reversed(metric.lower().split("/")):
        if part not in _DATA:
            return _BETTER.get(re.split(r"[_. -]", part)[-1])
    return None
