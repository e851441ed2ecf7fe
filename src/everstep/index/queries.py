"""What the index is asked: runs, and the rows of one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, func, select

from everstep.errors import ConfigError, nearest
from everstep.index.schema import events, metrics, runs, segments, series
from everstep.record import Rollback, Row

FACTS = ("name", "status", "reason", "step", "epoch", "created", "started", "heartbeat", "seed", "path")
"""What is known of every run."""

_PHASES = {"tail": 0, "epoch": 1, "step": 3, "head": 4}
"""Which phase a metric's bare name means, where it has several: the lowest (evaluations: 2)."""


class Summary(NamedTuple):
    """A metric in one phase: its number of valid rows, the last value and its step, the extremes.

    The extremes are those of finite values, None if there are none.
    """

    phase: str
    name: str
    rows: int
    step: int
    last: float
    smallest: float | None
    largest: float | None


def all_runs(connection: Connection, wanted: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Every run, the newest start last.

    Args:
        wanted: further names: a metric ("valid_loss", or "PHASE/NAME"), whose last value is given, or a
            path into the facts of the newest start ("git.commit", "config.controllers").

    Returns:
        A dict per run with the keys `FACTS`, host, and those of `wanted` that it has.

    Raises:
        ConfigError: no run has one of them; names the nearest.
    """
    found = {
        row.id: {name: getattr(row, name) for name in (*FACTS, "host")}
        for row in connection.execute(select(runs).order_by(runs.c.started.nulls_first(), runs.c.name))
    }
    for name in dict.fromkeys(wanted):
        if name in FACTS:
            continue
        values = _last_values(connection, name)
        if not values and found:
            values, known = _facts_at(connection, name)
            if name.partition(".")[0] not in known:
                raise ConfigError(f"no run has {name!r}; {nearest(name, known | _names(connection))}")
        for run, value in values.items():
            found[run][name] = value
    return list(found.values())


def _names(connection: Connection) -> set[str]:
    return set(FACTS) | set(connection.execute(select(series.c.name).distinct()).scalars())


def _last_values(connection: Connection, wanted: str) -> dict[int, float]:
    phase, _, name = wanted.rpartition("/")
    named = series.c.name == wanted
    if phase:
        named = named | ((series.c.name == name) & (series.c.phase == phase))
    best: dict[int, tuple[int, float]] = {}
    for run, phase, step, value in connection.execute(
        select(series.c.run, series.c.phase, _last(metrics.c.step), _last(metrics.c.value)).where(named)
    ):
        if step is not None:
            rank = _PHASES.get(phase, 2)
            if run not in best or rank < best[run][0]:
                best[run] = rank, math.nan if value is None else value
    return {run: value for run, (_, value) in best.items()}


def _last(column: ColumnElement[Any]) -> Any:
    """The last valid value of a column of `metrics`, of the series of the query around."""
    return (
        select(column)
        .join(segments, _valid())
        .where(metrics.c.series == series.c.id, segments.c.run == series.c.run)
        .order_by(metrics.c.segment.desc(), metrics.c.offset.desc(), metrics.c.row.desc())
        .limit(1)
        .correlate(series)
        .scalar_subquery()
    )


def _valid() -> ColumnElement[bool]:
    return (segments.c.number == metrics.c.segment) & (metrics.c.offset < segments.c.valid_to)


def _facts_at(connection: Connection, path: str) -> tuple[dict[int, Any], set[str]]:
    """Run -> what its newest start recorded at `path`; and the names with which a path may begin."""
    found: dict[int, Any] = {}
    known: set[str] = set()
    begun = select(segments.c.run, segments.c.facts).where(segments.c.begun == 1).order_by(segments.c.number)
    for run, text in connection.execute(begun):
        facts = json.loads(text)
        known |= facts.keys()
        found[run] = _at(facts, path)
    return found, known


def _at(tree: Any, path: str) -> Any:
    for part in path.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return json.dumps(tree) if isinstance(tree, dict | list) else tree


def find_run(connection: Connection, text: str) -> dict[str, Any]:
    """The run that is meant by a name, the beginning of one, or its directory's name.

    Returns:
        `FACTS`, and `id`, its key here.

    Raises:
        ConfigError: none is, or more than one.
    """
    found = [dict(row._mapping) for row in connection.execute(select(runs))]
    exact = [run for run in found if text in (run["name"], run["path"])]
    folder = [run for run in found if Path(run["path"]).name == text]
    begins = [run for run in found if run["name"].startswith(text)]
    for candidates in (exact, folder, begins):
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            names = ", ".join(sorted(run["name"] for run in candidates))
            raise ConfigError(f"{text!r} is the beginning of several runs; give one of them: {names}")
    raise ConfigError(f"there is no run {text!r}; {nearest(text, (run['name'] for run in found))}")


def metric_rows(connection: Connection, run: int, name: str, phase: str | None = None) -> list[Row]:
    """The valid rows of one metric of a run, in the order in which they were written, phase by phase.

    Args:
        name: the metric, or "PHASE/NAME" for one phase.

    Raises:
        ConfigError: the run has no such metric; names the nearest.
    """
    mine = select(series.c.id, series.c.phase, series.c.name).where(series.c.run == run)
    known = [(key, in_phase, called) for key, in_phase, called in connection.execute(mine)]
    chosen = [one for one in known if name in (one[2], f"{one[1]}/{one[2]}") and phase in (None, one[1])]
    if not chosen:
        where = "" if phase is None else f" in phase {phase!r}"
        names = {called for _, in_phase, called in known} | {f"{p}/{n}" for _, p, n in known}
        raise ConfigError(f"the run has no metric {name!r}{where}; {nearest(name, names)}")
    rows = []
    for key, in_phase, called in sorted(chosen, key=lambda one: (_PHASES.get(one[1], 2), one[1])):
        for row in connection.execute(
            select(
                metrics.c.segment,
                metrics.c.epoch,
                metrics.c.step,
                metrics.c.seq,
                metrics.c.value,
                metrics.c["count"],
                metrics.c.wall,
            )
            .join(segments, _valid())
            .where(metrics.c.series == key, segments.c.run == run)
            .order_by(metrics.c.segment, metrics.c.offset, metrics.c.row)
        ):
            segment, epoch, step, seq, value, count, wall = row
            value = math.nan if value is None else value
            rows.append(Row(segment, epoch, step, in_phase, called, seq, value, count, bool(wall)))
    return rows


def summaries(connection: Connection, run: int) -> list[Summary]:
    """The metrics of a run, those measured outside steps first."""
    finite = metrics.c.value.between(-1.7976931348623157e308, 1.7976931348623157e308)
    found = connection.execute(
        select(
            series.c.phase,
            series.c.name,
            func.count(metrics.c.step),
            _last(metrics.c.step),
            _last(metrics.c.value),
            func.min(metrics.c.value).filter(finite),
            func.max(metrics.c.value).filter(finite),
        )
        .join(metrics, metrics.c.series == series.c.id)
        .join(segments, _valid() & (segments.c.run == series.c.run))
        .where(series.c.run == run)
        .group_by(series.c.id)
    )
    rows = [
        Summary(p, n, k, s, math.nan if v is None else v, low, high) for p, n, k, s, v, low, high in found
    ]
    return sorted(rows, key=lambda one: (_PHASES.get(one.phase, 2), one.phase, one.name))


def metric_names(connection: Connection, run: int) -> list[tuple[str, str]]:
    """(phase, name) of every metric of a run."""
    found = connection.execute(select(series.c.phase, series.c.name).where(series.c.run == run))
    return [(phase, name) for phase, name in found]


def starts(connection: Connection, run: int) -> list[dict[str, Any]]:
    """The starts of a run, the first one first; `facts` and `problems` as Python values."""
    found = connection.execute(select(segments).where(segments.c.run == run).order_by(segments.c.number))
    return [
        {
            **{name: value for name, value in row._mapping.items() if name not in ("run", "begun")},
            "facts": json.loads(row.facts),
            "problems": json.loads(row.problems),
        }
        for row in found
    ]


def rollbacks(connection: Connection, run: int) -> list[Rollback]:
    """The rollbacks of a run since it began from nothing, in order."""
    begun = select(func.max(segments.c.number)).where(
        segments.c.run == run, segments.c.begun == 1, segments.c.parent.is_(None)
    )
    found = connection.execute(
        select(events.c.data, events.c.segment)
        .where(events.c.run == run, events.c.kind == "decision")
        .where(events.c.segment >= func.coalesce(begun.scalar_subquery(), 0))
        .order_by(events.c.segment, events.c.offset)
    )
    return Rollback.among((json.loads(row.data), row.segment) for row in found)
