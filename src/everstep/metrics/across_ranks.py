"""Reduction of metrics over ranks: weighted means, summed in the order of ranks, equal on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from everstep.contracts.group import Group

Value: TypeAlias = tuple[int, str, float]
"""(step, name, value)."""


class AcrossRanks:
    """Reduces the metrics of all ranks; every rank makes the same calls.

    Args:
        group: two or more ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def steps(self, values: Sequence[Value], weights: Mapping[int, float]) -> list[Value]:
        """Return the means of values that were collected inside steps.

        The n-th value of a name in a step is reduced with the n-th values of the other ranks; a rank that
        has none takes no part.

        Args:
            values: this rank's values, in the order of collection.
            weights: weight of this rank's part of the batch, by step; 1.0 where a step is missing.
        """
        columns: dict[str, tuple[list[int], list[float]]] = {}
        for step, name, value in values:
            column = columns.setdefault(name, ([], []))
            column[0].append(step)
            column[1].append(value)
        mine = [columns, list(weights.items())]
        parts: dict[tuple[int, str, int], list[tuple[float, float]]] = {}
        for theirs, pairs in self._group.gather(mine, "the metrics of the last steps"):
            weight = dict(map(tuple, pairs))
            for name, (steps, numbers) in theirs.items():
                seen: dict[int, int] = {}
                for step, number in zip(steps, numbers, strict=True):
                    nth = seen[step] = seen.get(step, -1) + 1
                    parts.setdefault((step, name, nth), []).append((number, weight.get(step, 1.0)))
        return [(step, name, _mean(found)) for (step, name, _), found in sorted(parts.items(), key=_by_step)]

    def values(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the means of values that every rank has collected outside steps, by name."""
        parts: dict[str, list[tuple[float, float]]] = {}
        for theirs in self._group.gather(dict(values), f"the metrics {', '.join(sorted(values))}"):
            for name, number in theirs.items():
                parts.setdefault(name, []).append((number, 1.0))
        return {name: _mean(parts[name]) for name in values}

    def mean(self, name: str, mean: float | None, weight: float) -> float | None:
        """Return the mean of the ranks' weighted means; None where no rank has a value.

        Args:
            mean: this rank's mean; None for a rank without a value, which takes no part.
            weight: sum of the weights in this rank's mean.
        """
        found = self._group.gather([mean, weight], f"the mean of {name}")
        parts = [(number, amount) for number, amount in found if number is not None]
        return _mean(parts) if parts else None


def _by_step(item: tuple[tuple[int, str, int], Any]) -> int:
    return item[0][0]  # the sort is stable: within a step the order of collection stays


def _mean(parts: Sequence[tuple[float, float]]) -> float:
    first = parts[0][0]
    if all(number == first for number, _ in parts):
        return first  # the sum and the division would round
    weighed = [(number, weight) for number, weight in parts if weight]  # 0 x NaN is NaN
    if not weighed:
        return math.nan
    return sum(number * weight for number, weight in weighed) / sum(weight for _, weight in weighed)
