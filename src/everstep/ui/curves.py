"""Curves for charts: as many points as a chart has room for, with the smallest and largest value kept.

The index holds the values of a block as packed numbers, so reading them takes no time per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Connection, select

from everstep.display.cells import json_safe
from everstep.index.database import Database
from everstep.index.sql_tables import UnknownContentError, blocks, segments, series
from everstep.record.journal_format import GROUP, block_columns
from everstep.ui.runs_table import run_id

POINTS = 1000
"""Points of a curve for which nobody chose a number; of many curves, each gets less."""

MOST_POINTS = 100_000
"""Most points of all curves together, if nobody chose a number; and most points that may be asked of one."""

Floats = NDArray[np.float64]


class CurveOptions(NamedTuple):
    """Metric, its phase, the axis ("step" or "time"), the part of it, the points.

    "time" is that in which the run was alive, in seconds: between two starts it stands still.
    `superseded`: also the values that later starts replaced.  `timed`: also the time of each point.
    """

    stream: str
    metric: str
    axis: str = "step"
    begin: float | None = None
    end: float | None = None
    points: int | None = None
    superseded: bool = False
    timed: bool = False


class Rows(NamedTuple):
    """Rows of one metric in one phase, as they were written; `valid`: of the run as it is now.

    `times` are seconds in which the run was alive, interpolated between the times of blocks.
    """

    steps: NDArray[np.int64]
    values: Floats
    times: Floats
    valid: NDArray[np.bool_]


def curves(database: Database, runs: Sequence[Mapping[str, Any]], options: CurveOptions) -> dict[str, Any]:
    """Return a metric of several runs, as JSON with arrays of NumPy."""
    points = options.points or max(100, min(POINTS, MOST_POINTS // (2 * max(1, len(runs)))))
    keys, metric, curve_of = [run["id"] for run in runs], (options.stream, options.metric), dict[int, Any]()
    with database.read() as connection:
        if options == CurveOptions(*metric, points=options.points):  # all of it, by steps
            for key, blocks_of in _read(connection, keys, *metric, blocks.c.sketch):
                curve_of[key] = _from_sketches(blocks_of, points)
        keys = [key for key in keys if not curve_of.get(key)]
        for key, rows in read_rows(connection, keys, *metric).items():
            curve_of[key] = _curve(rows, options, points)
    return {"x": options.axis, "series": [{"run": run_id(run), **curve_of[run["id"]]} for run in runs]}


def _read(
    connection: Connection, runs: Sequence[int], phase: str, name: str, content: ColumnElement[Any]
) -> Iterator[tuple[int, Iterator[Any]]]:
    """Yield the key of each run that has a metric, with its blocks in the order of writing."""
    condition = series.c.run.in_(runs) & (series.c.phase == phase) & (series.c.name == name)
    query = (
        select(
            *(series.c.run, blocks.c.segment, blocks.c.offset, content),
            *(segments.c.valid_to, segments.c.started, segments.c.last, segments.c.zero),
        )
        .join(blocks, blocks.c.series == series.c.id)
        .outerjoin(segments, (segments.c.run == series.c.run) & (segments.c.number == blocks.c.segment))
        .where(condition)
        .order_by(series.c.run, blocks.c.segment, blocks.c.offset)
    )
    return groupby(connection.execute(query), itemgetter(0))


def _from_sketches(sketches: Iterable[Any], points: int) -> dict[str, Any] | None:
    """Return the curve of very many rows from sketches; None where all values are wanted.

    A group of rows lies at its last step, so all groups must be narrower than the places of the curve.
    """
    parts, sizes = [np.empty(0)], {True: 0, False: 0}
    try:
        for block in sketches:
            sketch, is_valid = np.frombuffer(block.sketch, "<f8"), block.offset < block.valid_to
            size = int(sketch[0])
            if is_valid and sketch[1]:
                return None
            sizes[is_valid] += size
            parts += [sketch[2:]] * is_valid
    except (TypeError, ValueError, IndexError, OverflowError) as error:
        raise UnknownContentError(f"a block belongs to no start, or holds no sketch: {error}") from None
    steps, least, largest, last = np.concatenate(parts).reshape(-1, 4).T
    n = sizes[True]
    if n < 4 * GROUP * points or not (np.abs(steps) < 1 << 53).all():  # whole numbers in float64
        return None
    if np.diff(steps).max() * points > np.ptp(steps):
        return None
    thin = _thinned(steps.astype(np.int64), least, largest, last, points)
    return {"n": n, "n_superseded": sizes[False], **thin}


def read_rows(connection: Connection, runs: Sequence[int], phase: str, name: str) -> dict[int, Rows]:
    """Return run -> rows of a metric, for the keys of some runs; empty for a run without the metric."""
    pieces: dict[int, list[Rows]] = {run: [_NONE] for run in runs}
    for run, entries in _read(connection, runs, phase, name, blocks.c.packed):
        pieces[run] += [_unpack(list(start)) for _, start in groupby(entries, itemgetter(1))]
    return {run: Rows(*map(np.concatenate, zip(*each, strict=True))) for run, each in pieces.items()}


_NONE = Rows(np.empty(0, np.int64), np.empty(0), np.empty(0), np.empty(0, np.bool_))


def _unpack(entries: Sequence[Any]) -> Rows:
    """Unpack the blocks that a start has written; a block's rows came since the block before."""
    valid_to, started, last, zero = entries[0][4:]
    try:
        times, steps, values = zip(*(block_columns(memoryview(one.packed)) for one in entries), strict=True)
        valid = [block.offset < valid_to for block in entries]
    except (TypeError, ValueError) as error:
        raise UnknownContentError(f"a block belongs to no start, or holds no values: {error}") from None
    counts, ends = np.array([len(one) for one in steps]), np.array(times)
    begins = np.minimum(np.append(started or last or 0.0, ends[:-1]), ends)
    place = np.arange(1, counts.sum() + 1) - np.repeat(np.cumsum(counts) - counts, counts)
    moments = np.repeat(begins, counts) + np.repeat((ends - begins) / counts, counts) * place
    return Rows(np.concatenate(steps), np.concatenate(values), moments - zero, np.repeat(valid, counts))


def _curve(rows: Rows, options: CurveOptions, points: int) -> dict[str, Any]:
    x = rows.times if options.axis == "time" else rows.steps
    inside = np.ones(len(x), np.bool_)
    if options.begin is not None:
        inside &= x >= options.begin
    if options.end is not None:
        inside &= x <= options.end
    now, superseded = inside & rows.valid, inside & ~rows.valid
    beside = (rows.times,) if options.timed else ()
    values = rows.values[now]
    thin = _thinned(x[now], values, values, values, points, *(times[now] for times in beside))
    curve: dict[str, Any] = {"n": int(now.sum()), "n_superseded": int(superseded.sum()), **thin}
    indices = np.flatnonzero(now & ~np.isfinite(rows.values))
    if len(indices):
        curve["n_nonfinite"] = len(indices)
        curve["nonfinite"] = _points(indices, points, x, rows.values, *beside)
    if options.superseded:
        curve["superseded"] = _points(np.flatnonzero(superseded), points, x, rows.values, *beside)
    return curve


def _points(places: NDArray[Any], most: int, *columns: NDArray[Any]) -> list[list[Any]]:
    """Return at most `most` rows, at equal distances, as lists for JSON."""
    some = places[:: max(1, -(-len(places) // most))]
    return [[*map(json_safe, row)] for row in zip(*(one[some].tolist() for one in columns), strict=True)]


def _thinned(
    x: NDArray[Any], least: Floats, largest: Floats, last: Floats, points: int, times: Floats | None = None
) -> dict[str, Any]:
    """Thin out a curve to `points` places at most: the last value at each, least and largest there."""
    order = np.argsort(x, kind="stable")
    x, least, largest, last = x[order], least[order], largest[order], last[order]
    first = np.arange(len(x))
    if len(x) > points:
        # Places of equal width: a chart's columns.  Those without a row are left out.
        edges = np.linspace(float(x[0]), float(x[-1]), points + 1)[:-1]
        first = np.unique(np.searchsorted(x, edges, "left"))
    end = np.append(first[1:], len(x))[: len(first)] - 1
    thin = {
        "x": x[end],
        "min": _numbers(np.fmin.reduceat(least, first) if len(first) else least),
        "max": _numbers(np.fmax.reduceat(largest, first) if len(first) else largest),
        "last": _numbers(last[end]),
    }
    return thin if times is None else {**thin, "times": times[order][end]}


def _numbers(values: Floats) -> Any:
    """Return values for JSON, which has no NaN and no infinity."""
    if np.isfinite(values).all():
        return np.ascontiguousarray(values)
    return [*map(json_safe, values.tolist())]
