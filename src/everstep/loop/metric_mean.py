"""Mean of values with weights, collected as one metric."""

from __future__ import annotations

from typing import Any

from everstep.metrics import Window
from everstep.metrics.collector import to_scalar


class MetricMean:
    """The weighted mean of what was collected."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._window = Window()

    def collect(self, value: Any, weight: float = 1.0) -> None:
        """Add one value with a weight of 0 or more.

        Raises:
            MetricError: the value is not one real number, or the weight is negative.
        """
        self._window.add(float(to_scalar(self._name, value)), weight)

    @property
    def mean(self) -> float | None:
        """The mean so far, None before the first value."""
        stats = self._window.stats()
        return None if stats is None else stats.mean
