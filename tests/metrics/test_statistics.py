"""Windows, and statistics of an evaluation: NumPy's, however values were grouped, in little memory."""

from __future__ import annotations

import math
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import ConfigError, MetricError
from everstep.metrics import Stats, Window, statistics
from everstep.metrics.statistics import Aggregate, ExactSum, checked_statistics

finite = st.floats(-1e12, 1e12, allow_subnormal=False)
anything = st.floats()
weights = st.one_of(st.just(0.0), st.floats(1e-6, 1e6))
weighted = st.lists(st.tuples(finite, weights), min_size=1, max_size=60)


def window(values: list[float], weights: list[float] | None = None) -> Window:
    made = Window()
    made.add_many(values, weights)
    return made


def stats(values: list[float], weights: list[float] | None = None) -> Stats:
    found = window(values, weights).stats()
    assert found is not None
    return found


def bits(window: Window) -> bytes:
    found = window.stats()
    return b"" if found is None else struct.pack("<qdddddd", *found)


@given(weighted)
def test_weights_agree_with_numpy(pairs: list[tuple[float, float]]) -> None:
    values, weights = map(list, zip(*pairs, strict=True))
    found = stats(values, weights)
    assert (found.min, found.max, found.last) == (min(values), max(values), values[-1])
    if sum(weights) == 0.0:
        assert math.isnan(found.mean) and math.isnan(found.std)
        return
    mean = np.average(values, weights=weights)
    std = math.sqrt(np.average((np.array(values) - mean) ** 2, weights=weights))
    scale = max(map(abs, values))
    assert found.weight == pytest.approx(sum(weights))
    assert found.mean == pytest.approx(mean, rel=1e-11, abs=1e-11 * scale)
    assert found.std == pytest.approx(std, rel=1e-7, abs=1e-7 * scale)


@given(st.lists(st.tuples(anything, weights), max_size=40), st.data())
def test_neither_grouping_nor_a_restore_changes_a_bit(
    pairs: list[tuple[float, float]], data: st.DataObject
) -> None:
    whole, pieces = Window(), Window()
    for value, weight in pairs:
        whole.add(value, weight)
    start = 0
    while start < len(pairs):
        end = data.draw(st.integers(start + 1, len(pairs)))
        pieces.add_many([v for v, _ in pairs[start:end]], [w for _, w in pairs[start:end]])
        pieces = Window.from_state(dict(pieces.state()))  # the codec keeps the bits of a NaN, JSON would not
        start = end
    assert bits(whole) == bits(pieces)


@given(st.lists(anything, min_size=1, max_size=40), st.integers(0, 40))
def test_weights_of_one_are_no_weights(values: list[float], split: int) -> None:
    mixed = window(values[:split])
    mixed.add_many(values[split:], [1.0] * len(values[split:]))
    assert bits(mixed) == bits(window(values))


def test_a_large_mean_does_not_cancel_the_spread() -> None:
    noise = np.random.default_rng(0).normal(size=50_000)
    values = (1e8 + noise).tolist()
    assert stats(values).std == pytest.approx(np.std(np.array(values) - 1e8), rel=1e-9)


@given(finite, st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=50))
def test_equal_values_have_that_mean_and_no_spread(value: float, weights: list[float]) -> None:
    found = stats([value] * len(weights), weights)
    assert found.mean == value and found.std == 0.0


@pytest.mark.parametrize("values", [[math.nan], [1.0, math.nan, 2.0], [math.nan, 1.0]])
@pytest.mark.parametrize("weights", [None, 1.0])
def test_nan_makes_everything_nan(values: list[float], weights: float | None) -> None:
    found = stats(values, weights and [weights] * len(values))
    assert all(map(math.isnan, (found.mean, found.std, found.min, found.max)))


@pytest.mark.parametrize("values", [[math.inf], [1.0, math.inf], [-math.inf, 1.0], [math.inf, -math.inf]])
def test_infinity_shows_in_the_extremes_and_in_the_mean(values: list[float]) -> None:
    found = stats(values)
    assert str(found.mean) == str(sum(values)) and math.isnan(found.std)
    assert (found.min, found.max) == (min(values), max(values))


def test_a_weight_of_zero_counts_but_does_not_weigh() -> None:
    found = stats([math.inf, 2.0, 4.0], [0.0, 1.0, 3.0])
    assert found == Stats(3, 4.0, 3.5, math.sqrt(0.75), 2.0, math.inf, 4.0)


def test_impossible_weights_are_refused_and_add_nothing() -> None:
    made = Window()
    for weight in (-1.0, math.nan, math.inf):
        with pytest.raises(MetricError, match=r"metric weight .*: give a finite weight of 0 or more"):
            made.add_many([1.0, 2.0], [1.0, weight])
    with pytest.raises(MetricError, match="2 values came with 1 weights"):
        made.add_many([1.0, 2.0], [1.0])
    assert made.stats() is None


def test_an_empty_window_has_no_statistics() -> None:
    assert Window().stats() is None and window([]).stats() is None
    assert window([3.0]).stats() == Stats(1, 1.0, 3.0, 0.0, 3.0, 3.0, 3.0)


ALL = (
    *("mean", "sum", "std", "var", "min", "max", "median", "q0", "q25", "q99.9", "q100"),
    *("nanmean", "nansum", "nanstd", "nanvar", "nanmin", "nanmax", "nanmedian", "nanq90"),
    *("nancount", "nanfraction"),
)


def aggregate(values: list[float], batch: int = 7, names: tuple[str, ...] = ALL) -> dict[str, float]:
    found = Aggregate(names)
    for start in range(0, len(values), batch):
        part = values[start : start + batch]
        found.add(part, [1.0] * len(part))
    return found.read("x")


def numpys(values: list[float]) -> dict[str, float]:
    """The same by NumPy's functions of those names."""
    expected = {"x": float(np.mean(values))}
    for name in ALL:
        nan = "nan" if name.startswith("nan") else ""
        bare = name.removeprefix("nan")
        if bare[1:].replace(".", "").isdigit():
            expected[f"x/{name}"] = float(getattr(np, f"{nan}quantile")(values, float(bare[1:]) / 100))
        elif bare not in ("count", "fraction"):
            expected[f"x/{name}"] = float(getattr(np, name)(values))
    nans = float(np.isnan(values).sum())
    return expected | {"x/nancount": nans, "x/nanfraction": nans / len(values)}


@pytest.mark.parametrize("nans", [0, 3])
def test_they_are_numpys(nans: int) -> None:
    values = [*np.random.default_rng(0).standard_normal(100).tolist(), *[math.nan] * nans]
    found, expected = aggregate(values), numpys(values)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-12, nan_ok=True), name


@pytest.mark.campaign("long")
def test_a_million_values_in_bounded_memory_and_exactly() -> None:
    values = np.random.default_rng(1).standard_normal(1_000_000)
    found = Aggregate(("nanmean", "q90"))
    tracemalloc.start()
    for part in np.split(values, 100):
        found.add(part.tolist(), [1.0] * len(part))
    read = found.read("x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read["x/q90"] == np.quantile(values, 0.9)
    assert read["x/nanmean"] == read["x"] == math.fsum(values) / 1_000_000
    assert peak < 40e6


def test_beyond_the_bound_quantiles_are_those_of_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "KEPT", 10_000)
    values = np.random.default_rng(2).permutation(100_000).astype(float).tolist()
    found = aggregate(values, 997, ("median", "q90", "nanq10"))
    for name, q in (("median", 0.5), ("q90", 0.9), ("nanq10", 0.1)):
        assert found[f"x/{name}"] == pytest.approx(
            q * 100_000, abs=5 * 100_000 * math.sqrt(q * (1 - q) / 10_000)
        )
    assert aggregate(values, 997, ("median", "q90", "nanq10")) == found


def test_spreads_are_weighted_and_quantiles_are_not() -> None:
    found = Aggregate(("std", "median"))
    found.add([1.0, 3.0], [3.0, 1.0])
    assert found.read("x") == {"x": 1.5, "x/std": np.std([1, 1, 1, 3]), "x/median": 2.0}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1e16, 1.0, -1e16] * 3000, 3000.0),
        ([0.1] * 10_000, math.fsum([0.1] * 10_000)),
        ([math.inf, 1.0], math.inf),
        ([1.0, math.nan], math.nan),
        ([1e308] * 10, math.inf),
        ([], 0.0),
    ],
)
def test_sums_are_exact(values: list[float], expected: float) -> None:
    total = ExactSum()
    for start in range(0, len(values), 11):
        total.add(values[start : start + 11])
    assert total.value == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("name", ["avg", "q101", "q", "nanp50", "nan", "95", 3])
def test_an_unknown_statistic_names_what_there_is(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"there is no statistic .* a percentile is q90 or nanq90; .*known: "
    ):
        checked_statistics({"loss": [name]})


def test_statistics_are_given_by_metric() -> None:
    assert checked_statistics({"loss": "std", "x": ["q5"]}) == {"loss": ("std",), "x": ("q5",)}
    with pytest.raises(ConfigError, match="give metrics and their statistics"):
        checked_statistics(["std"])  # type: ignore[arg-type]
