"""Running statistics of one metric: one pass, constant memory, the same bits however values arrive.

Values are folded strictly one after another, so neither the grouping into calls nor a save and
restore between two values can change a bit of the result.

Sources: Welford, Technometrics 4 (1962) 419, for the update; West, CACM 22 (1979) 532, for weights;
Chan, Golub and LeVeque, The American Statistician 37 (1983) 242, for shifting the data by their first
value, which keeps 1e8 + noise exact and makes the std of equal values 0 and not rounding noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

from everstep.errors import MetricError


class Stats(NamedTuple):
    """Statistics of the values of one window; NaN and infinities are not ignored.

    Attributes:
        count, weight: number of values, also of those of weight 0, and the sum of the weights.
        mean: weighted mean; NaN if all weights are 0.
        std: weighted population standard deviation, sqrt(sum w (x - mean)^2 / sum w); NaN where the
            mean is not finite.
        min, max: smallest and largest value, whatever its weight; NaN if any value is NaN.
        last: the value added last.
    """

    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody wants here
    weight: float
    mean: float
    std: float
    min: float
    max: float
    last: float


class Window:
    """Running window of one metric's values."""

    __slots__ = ("_count", "_first", "_last", "_max", "_mean", "_min", "_spread", "_weight")

    def __init__(self) -> None:
        self._count = 0
        self._weight = 0.0
        self._first = 0.0  # the shift: the first value with a weight
        self._mean = 0.0  # weighted mean of x - first
        self._spread = 0.0  # sum of w (x - mean)^2
        self._min = math.inf
        self._max = -math.inf
        self._last = math.nan

    def add(self, value: float, weight: float = 1.0) -> None:
        self.add_many((value,), None if weight == 1.0 else (weight,))

    def add_many(self, values: Sequence[float], weights: Sequence[float] | None = None) -> None:
        """Add values in order, to the same bits as one by one."""
        if weights is not None and len(values) != len(weights):
            raise MetricError(f"{len(values)} values came with {len(weights)} weights; give one for each")
        for w in weights or ():
            if not 0.0 <= w < math.inf:
                raise MetricError(f"metric weight {w!r}: give a finite weight of 0 or more")
        first, weight, mean, spread = self._first, self._weight, self._mean, self._spread
        low, high = self._min, self._max
        for x, w in zip(values, repeat(1.0) if weights is None else weights, strict=False):
            if x < low:
                low = x
            if x > high:
                high = x
            if x != x:
                low = high = math.nan
            if w == 0.0:
                continue
            if weight == 0.0:
                first = float(x)
            weight += w
            shifted = x - first
            delta = shifted - mean
            mean += w * delta / weight
            spread += w * delta * (shifted - mean)
        self._first, self._weight, self._mean, self._spread = first, weight, mean, spread
        self._min, self._max = low, high
        self._count += len(values)
        if values:
            self._last = float(values[-1])

    def stats(self) -> Stats | None:
        """Return statistics of all values since it was made, None if there are none."""
        if self._count == 0:
            return None
        mean = std = math.nan
        if self._weight > 0.0 and math.isfinite(self._mean):
            mean = self._first + self._mean
            std = math.sqrt(max(self._spread / self._weight, 0.0))  # max(nan, 0.0) is nan
        elif self._weight > 0.0 and (math.isinf(self._min) or math.isinf(self._max)):
            mean = self._min + self._max  # NaN where min and max are infinities of both signs
        return Stats(self._count, self._weight, mean, std, float(self._min), float(self._max), self._last)

    def state(self) -> dict[str, float]:
        """Return the window's content, as eight numbers by name (floats may be NaN or infinite)."""
        return {slot[1:]: getattr(self, slot) for slot in self.__slots__}

    @classmethod
    def from_state(cls, state: Mapping[str, float]) -> Window:
        """Make the window that `state` returned; it continues bit-equal to the saved window."""
        window = cls()
        for slot in cls.__slots__:
            if not isinstance(value := state[slot[1:]], int | float):
                raise TypeError(f"{slot[1:]} is {value!r}")
            setattr(window, slot, value)
        return window
