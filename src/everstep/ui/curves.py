"""Curves for charts: as many points as a chart has room for, with the smallest and largest value kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from everstep.index.database import Database
from everstep.ui.runs_table import run_id, shown
from everstep.ui.stored_rows import Floats, Rows, StoredRows

POINTS = 1000
"""Points of a curve for which nobody chose a number; of many curves, each gets less."""

MOST_POINTS = 100_000
"""Most points of all curves together, if nobody chose a number; and most points that may be asked of one."""


class Asked(NamedTuple):
    """Question for curves: the metric, its phase, the axis ("step" or "time"), the part of it, the points.

    `superseded`: also the values that later starts replaced.  `timed`: also when each point was measured.
    """

    stream: str
    metric: str
    axis: str = "step"
    begin: float | None = None
    end: float | None = None
    points: int | None = None
    superseded: bool = False
    timed: bool = False


def curves(
    stored: StoredRows, database: Database, runs: Sequence[Mapping[str, Any]], asked: Asked
) -> dict[str, Any]:
    """Return a metric of several runs, as JSON with arrays of NumPy."""
    points = asked.points or max(100, min(POINTS, MOST_POINTS // (2 * max(1, len(runs)))))
    with database.read() as connection:
        found = stored.read(database, connection, runs, asked.stream, asked.metric)
    told = [_curve(rows, asked, points) for rows in found]
    return {
        "x": asked.axis,
        "series": [{"run": run_id(run), **one} for run, one in zip(runs, told, strict=True)],
    }


def _curve(rows: Rows, asked: Asked, points: int) -> dict[str, Any]:
    x = rows.times if asked.axis == "time" else rows.steps
    inside = np.ones(len(x), np.bool_)
    if asked.begin is not None:
        inside &= x >= asked.begin
    if asked.end is not None:
        inside &= x <= asked.end
    now, before = inside & rows.valid, inside & ~rows.valid
    beside = (rows.times,) if asked.timed else ()
    thin = _thinned(x[now], rows.values[now], points, *(times[now] for times in beside))
    told: dict[str, Any] = {"n": int(now.sum()), "n_superseded": int(before.sum()), **thin}
    odd = np.flatnonzero(now & ~np.isfinite(rows.values))
    if len(odd):
        told["n_nonfinite"] = len(odd)
        told["nonfinite"] = _points(_some(odd, points), x, rows.values, *beside)
    if asked.superseded:
        told["superseded"] = _points(_some(np.flatnonzero(before), points), x, rows.values, *beside)
    return told


def _some(places: NDArray[Any], most: int) -> NDArray[Any]:
    """Choose at most `most` places, at equal distances."""
    return places[:: max(1, -(-len(places) // most))]


def _points(at: NDArray[Any], *columns: NDArray[Any]) -> list[list[Any]]:
    """Return some rows as lists for JSON."""
    return [
        [shown(value) for value in row] for row in zip(*(one[at].tolist() for one in columns), strict=True)
    ]


def _thinned(
    x: NDArray[Any], values: Floats, points: int, times: NDArray[Any] | None = None
) -> dict[str, Any]:
    """Thin out a curve to at most `points` places along its axis.

    Returns:
        x, min, max and last: the axis and value of the last row at each place, the smallest and the largest
        value of all rows there.  NaN counts as a value only where there is no other.  times: of the last
        rows, if `times` are given.
    """
    if len(x) > 1 and (np.diff(x) < 0).any():
        order = np.argsort(x, kind="stable")
        x, values = x[order], values[order]
        times = None if times is None else times[order]
    if len(x) <= points:
        last = np.arange(len(x))
        least = most = _numbers(values)
    else:
        # Places of equal width: a chart's columns.  Those without a row are left out.
        edges = np.linspace(float(x[0]), float(x[-1]), points + 1)[:-1]
        first = np.unique(np.searchsorted(x, edges, "left"))
        last = np.append(first[1:], len(x)) - 1
        least = _numbers(np.fmin.reduceat(values, first))
        most = _numbers(np.fmax.reduceat(values, first))
    told = {"x": x[last], "min": least, "max": most, "last": _numbers(values[last])}
    return told if times is None else {**told, "times": times[last]}


def _numbers(values: Floats) -> Any:
    """Return values for JSON, which has no NaN and no infinity."""
    if np.isfinite(values).all():
        return np.ascontiguousarray(values)
    return [shown(value) for value in values.tolist()]
