"""Mean of values with weights, collected as one metric."""

from __future__ import annotations

from typing import Any

from everstep.metrics import Window
from everstep.metrics.across_ranks import AcrossRanks
from everstep.metrics.collector import to_scalar


class MetricMean:
    """The weighted mean of what was collected, on all ranks.

    Args:
        name: name of the metric.
        across: reduces the sums over ranks; None where there is one rank.
    """

    def __init__(self, name: str, across: AcrossRanks | None = None) -> None:
        self._name, self._across = name, across
        self._window = Window()

    def collect(self, value: Any, weight: float = 1.0) -> None:
        """Add one value with a weight of 0 or more.

        Raises:
            MetricError: the value is not one real number, or the weight is negative.
        """
        self._window.add(float(to_scalar(self._name, value)), weight)

    @property
    def mean(self) -> float | None:
        """The mean so far, None before the first value; every rank asks for it."""
        stats = self._window.stats()
        mean, weight = (None, 0.0) if stats is None else (stats.mean, stats.weight)
        return mean if self._across is None else self._across.mean(self._name, mean, weight)
