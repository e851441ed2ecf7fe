"""Statistics of an evaluation: NumPy's, in memory that does not grow."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from everstep.errors import ConfigError
from everstep.metrics import aggregation
from everstep.metrics.aggregation import Aggregate, ExactSum, checked_statistics

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
    monkeypatch.setattr(aggregation, "KEPT", 10_000)
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
