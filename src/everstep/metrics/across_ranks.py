"""Reduction of metrics over ranks: weighted means, equal on every rank.

Of ranks that compute with the same samples together the first one counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from everstep.contracts.group import Group
from everstep.metrics.aggregation import Mean

Value: TypeAlias = tuple[int, str, float]
"""(step, name, value)."""


class AcrossRanks:
    """Reduces the metrics of all ranks; every rank makes the same calls."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def steps(self, values: Sequence[Value], weights: Mapping[int, float]) -> list[Value]:
        """Return the means of values that were collected inside steps, weighted by step (else by 1).

        The n-th value of a name in a step is reduced with the n-th values of the other ranks; a rank that
        has none takes no part.
        """
        mine = [(step, name, value, weights.get(step, 1.0)) for step, name, value in values]
        parts: dict[tuple[int, str, int], list[tuple[float, float]]] = {}
        for theirs in self._counted(self._group.gather_lists(mine, "the metrics of the last steps")):
            seen: Counter[tuple[int, str]] = Counter()
            for step, name, number, weight in theirs:
                seen[step, name] += 1
                parts.setdefault((step, name, seen[step, name]), []).append((number, weight))
        # the sort is stable: within a step the order of collection stays
        by_step = sorted(parts.items(), key=lambda item: item[0][0])
        return [(step, name, _mean(pairs)) for (step, name, _), pairs in by_step]

    def values(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the means of values that every rank has collected outside steps, by name."""
        parts: dict[str, list[tuple[float, float]]] = {}
        for theirs in self._counted(
            self._group.gather(dict(values), f"the metrics {', '.join(sorted(values))}")
        ):
            for name, number in theirs.items():
                parts.setdefault(name, []).append((number, 1.0))
        return {name: _mean(parts[name]) for name in values}

    def mean(self, name: str, mean: float | None, weight: float) -> float | None:
        """Return the mean of the ranks' weighted means; None where no rank has a value."""
        by_rank = self._counted(self._group.gather([mean, weight], f"the mean of {name}"))
        parts = [(number, amount) for number, amount in by_rank if number is not None]
        return _mean(parts) if parts else None

    def _counted(self, by_rank: Sequence[Any]) -> list[Any]:
        return [by_rank[rank] for rank in self._group.data.first]


def _mean(parts: Sequence[tuple[float, float]]) -> float:
    first = parts[0][0]
    if all(number == first for number, _ in parts):
        return first  # the sum and the division would round
    weighed = [(number, weight) for number, weight in parts if weight]  # 0 x NaN is NaN
    mean = Mean()
    mean.add([number for number, _ in weighed], [weight for _, weight in weighed])
    return mean.value
