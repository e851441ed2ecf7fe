"""Statistics of metrics: windows of training, values of an evaluation, means over ranks; in constant memory.

A window folds its values strictly one after another, so neither the grouping into calls nor a save and
restore between two values can change a bit of the result.  An evaluation's sums are exact (Shewchuk's
expansions, through `math.fsum`), so the order of its batches does not matter.

Sources: Welford, Technometrics 4 (1962) 419, for the update; West, CACM 22 (1979) 532, for weights;
Chan, Golub and LeVeque, The American Statistician 37 (1983) 242, for shifting the data by their first
value, which keeps 1e8 + noise exact and makes the std of equal values 0 and not rounding noise.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from everstep.contracts.group import Group
from everstep.errors import ConfigError, MetricError, nearest


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


# ------------------------------------------------------------------------- of an evaluation

KEPT = 1 << 22
"""Number of values up to which quantiles are exact (32 MiB).

More values are cut to a uniform sample of this size: the rank of the q-quantile then has a standard error of
sqrt(q (1 - q) / KEPT), at most 0.025 %.
"""

_SPREADS = ("std", "var", "min", "max")
_NAMES = ("mean", "sum", *_SPREADS, "median", "q50")
_KNOWN = (*_NAMES, *(f"nan{name}" for name in _NAMES), "nancount", "nanfraction")
_QUANTILE = re.compile(r"q(\d{1,3}(?:\.\d+)?)")
_COMPRESS_AT = 4096


def checked_statistics(stats: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    if not isinstance(stats, Mapping):
        raise ConfigError(
            f'stats={stats!r}: give metrics and their statistics, as {{"loss": ["std", "q90"]}}'
        )
    checked = {}
    for metric, names in stats.items():
        names = (names,) if isinstance(names, str) else tuple(names)
        for name in names:
            if name not in _KNOWN and _quantile(name) is None:
                raise ConfigError(
                    f"there is no statistic {name!r} (of {metric!r}); a percentile is q90 or nanq90; "
                    f"{nearest(str(name), _KNOWN)}"
                )
        checked[metric] = names
    return checked


def _quantile(name: Any) -> float | None:
    """Parse the quantile in a statistic's name, 0 to 1; None for other statistics."""
    bare = str(name).removeprefix("nan")
    if bare == "median":
        return 0.5
    match = _QUANTILE.fullmatch(bare)
    return float(match[1]) / 100 if match and float(match[1]) <= 100 else None


class ExactSum:
    """Sum that is rounded once, when it is read; with values that are not finite, their float sum."""

    def __init__(self) -> None:
        self._parts: list[float] = []
        self._special = 0.0

    def add(self, values: Iterable[float]) -> None:
        for value in values:
            if math.isfinite(value):
                self._parts.append(value)
            else:
                self._special += value
        if len(self._parts) > _COMPRESS_AT:
            parts: list[float] = []  # a few floats with exactly the same sum
            with suppress(OverflowError):
                while rest := math.fsum([*self._parts, *(-part for part in parts)]):
                    parts.append(rest)
                self._parts = parts

    @property
    def value(self) -> float:
        try:
            return self._special or math.fsum(self._parts)
        except OverflowError:
            return sum(self._parts)


class Mean:
    """Mean of (value, weight) pairs; NaN if all weights are 0."""

    def __init__(self) -> None:
        self.products, self.weights = ExactSum(), ExactSum()

    def add(self, values: Sequence[float], weights: Sequence[float]) -> None:
        self.products.add([value * weight for value, weight in zip(values, weights, strict=True)])
        self.weights.add(weights)

    @property
    def value(self) -> float:
        total = self.weights.value
        return self.products.value / total if total else math.nan


class Sample:
    """Values for quantiles: all values up to `KEPT`, then a uniform sample that only the values decide."""

    def __init__(self) -> None:
        self._values, self._count = array("d"), 0
        self._draw = np.random.Generator(np.random.PCG64(0))

    def add(self, values: Sequence[float]) -> None:
        room = max(KEPT - self._count, 0)
        self._values.extend(values[:room])
        if rest := values[room:]:  # Vitter's algorithm R: value number n stays with probability KEPT / n
            numbers = np.arange(self._count + room, self._count + len(values))
            places = self._draw.integers(0, numbers + 1)
            for at in np.flatnonzero(places < KEPT).tolist():
                self._values[places[at]] = rest[at]
        self._count += len(values)

    def quantile(self, q: float) -> float:
        with np.errstate(invalid="ignore"):  # between infinities
            return float(np.quantile(self._values, q)) if self._values else math.nan


class Aggregate:
    """Statistics of one metric of an evaluation.

    Means, sums and spreads are weighted (a batch's mean by its samples); quantiles take each value once.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = names
        nan = [name.removeprefix("nan") for name in names if name.startswith("nan")]
        self._all, self._finite = _Moments(names), _Moments(nan)
        self._of_finite = bool(nan)
        """Whether statistics of the values that are not NaN are requested."""
        self._count = self._nans = 0

    def add(self, values: Sequence[float], weights: Sequence[float]) -> None:
        self._all.add(values, weights)
        self._count += len(values)
        if self._of_finite:
            numbers = [(v, w) for v, w in zip(values, weights, strict=True) if not math.isnan(v)]
            self._nans += len(values) - len(numbers)
            self._finite.add([v for v, _ in numbers], [w for _, w in numbers])

    @property
    def mean_and_weight(self) -> tuple[float, float]:
        return self._all.mean.value, self._all.mean.weights.value

    def read(self, metric: str) -> dict[str, float]:
        """Return the mean under the metric's own name, and each requested statistic as METRIC/STATISTIC."""
        return {metric: self._all.mean.value} | {f"{metric}/{name}": self._read(name) for name in self.names}

    def _read(self, name: str) -> float:
        if name == "nancount":
            return float(self._nans)
        if name == "nanfraction":
            return self._nans / self._count if self._count else math.nan
        moments = self._finite if name.startswith("nan") else self._all
        return moments.read(name.removeprefix("nan"))


class _Moments:
    """Running values that the requested statistics need, and no others."""

    def __init__(self, names: Iterable[str]) -> None:
        names = set(names)
        self.mean, self._window = Mean(), Window()
        self._of_spread = bool(names & set(_SPREADS))
        self._sample = Sample() if any(_quantile(name) is not None for name in names) else None

    def add(self, values: Sequence[float], weights: Sequence[float]) -> None:
        self.mean.add(values, weights)
        if self._of_spread:
            self._window.add_many(values, weights)
        if self._sample is not None:
            self._sample.add(values)

    def read(self, name: str) -> float:
        if name == "mean":
            return self.mean.value
        if name == "sum":
            return self.mean.products.value
        if self._sample is not None and (q := _quantile(name)) is not None:
            return self._sample.quantile(q)
        stats = self._window.stats()
        if stats is None:
            return math.nan
        return stats.std**2 if name == "var" else float(getattr(stats, name))


# ------------------------------------------------------------------------- over the ranks of a run
# Means are equal on each rank, and every rank makes the same calls.  Of ranks that compute with the same
# samples together the first one counts.

Value: TypeAlias = tuple[int, str, float]  # step, name, value


def means_of_steps(group: Group, values: Sequence[Value], weights: Mapping[int, float]) -> list[Value]:
    """Return the means of values that were collected inside steps, weighted by step (else by 1).

    The n-th value of a name in a step is reduced with the n-th values of the other ranks; a rank that
    has none takes no part.
    """
    own_values = [(step, name, value, weights.get(step, 1.0)) for step, name, value in values]
    parts: dict[tuple[int, str, int], list[tuple[float, float]]] = {}
    for part in group.data.of_parts(group.gather_lists(own_values, "the metrics of the last steps")):
        seen: Counter[tuple[int, str]] = Counter()
        for step, name, number, weight in part:
            seen[step, name] += 1
            parts.setdefault((step, name, seen[step, name]), []).append((number, weight))
    # the sort is stable: within a step the order of collection stays
    by_step = sorted(parts.items(), key=lambda item: item[0][0])
    return [(step, name, _mean(pairs)) for (step, name, _), pairs in by_step]


def means_of_values(group: Group, values: Mapping[str, float]) -> dict[str, float]:
    """Return the means of values that every rank has collected outside steps, by name."""
    parts = group.data.of_parts(group.gather(dict(values), f"the metrics {', '.join(sorted(values))}"))
    return {name: _mean([(part[name], 1.0) for part in parts if name in part]) for name in values}


def mean_of_means(group: Group, name: str, mean: float | None, weight: float) -> float | None:
    """Return the mean of the ranks' weighted means; None where no rank has a value."""
    by_part = group.data.of_parts(group.gather([mean, weight], f"the mean of {name}"))
    parts = [(number, amount) for number, amount in by_part if number is not None]
    return _mean(parts) if parts else None


def _mean(parts: Sequence[tuple[float, float]]) -> float:
    first = parts[0][0]
    if all(number == first for number, _ in parts):
        return first  # the sum and the division would round
    weighed = [(number, weight) for number, weight in parts if weight]  # 0 x NaN is NaN
    mean = Mean()
    mean.add([number for number, _ in weighed], [weight for _, weight in weighed])
    return mean.value
