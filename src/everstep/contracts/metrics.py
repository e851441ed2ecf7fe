"""Rows of a metric, on their way from the collector to the journal, its readers and the index."""

from __future__ import annotations

from typing import NamedTuple


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
