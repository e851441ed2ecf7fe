"""SQL queries for runs, and for the rows of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Select, case, func, select

from everstep.errors import ConfigError, nearest
from everstep.index.fields import ELEMENT, leads, named, short, values_at
from everstep.index.filters import is_named
from everstep.index.sql_tables import events, fields, metrics, runs, segments, series
from everstep.index.translate import one_of
from everstep.redaction import without_credentials

if TYPE_CHECKING:
    from everstep.record import Rollback, Row  # it brings NumPy, which a list of runs does not need

GONE = "gone"
"""Status of a run whose directory was moved or deleted."""

STATUSES = ("running", "finished", "stopped", "failed", "killed", GONE)
"""All statuses."""

FACTS = (
    *("name", "status", "reason", "step", "epoch", "created", "started", "heartbeat", "seed", "path"),
    "diverged",
)
"""Facts of every run; `diverged` is the step of the first divergence that nobody has accepted, or None."""

TEXTS = ("name", "status", "reason", "path")
"""Facts that are strings; the others are numbers."""

_PHASES = {"tail": 0, "epoch": 1, "step": 3, "head": 4}
"""Rank of phases (evaluations: 2): a metric's bare name means its phase of lowest rank."""


class Summary(NamedTuple):
    """Summary of a metric in a phase: the number of valid rows, the last value and its step, the extremes.

    The extremes are those of the finite values; None without finite values.
    """

    phase: str
    name: str
    rows: int
    step: int
    last: float
    smallest: float | None
    largest: float | None


def all_runs(
    connection: Connection,
    wanted: Iterable[str] = (),
    gone: Collection[int] = (),
    where: ColumnElement[bool] | None = None,
    newest: NewestFacts | None = None,
) -> list[dict[str, Any]]:
    """List every run, the newest start last.

    Args:
        wanted: further names: a metric ("valid_loss", or "PHASE/NAME") gives its last value; a path into
            the facts of the newest start ("git.commit", "config.controllers") gives its first value, a list
            or an object as JSON.
        gone: keys of runs whose directories do not exist any more.
        where: condition that selects runs; None for all.
        newest: facts of the newest starts, if they have been read.

    Returns:
        A dict per run with the keys `FACTS`, id, host, and those of `wanted` that the run has.

    Raises:
        ConfigError: no run has a name of `wanted`; names the nearest.
    """
    chosen = select(runs).order_by(runs.c.started.nulls_first(), runs.c.name)
    if where is not None:
        chosen = chosen.where(where)
    found = {row["id"]: dict(row) for row in connection.execute(chosen).mappings()}
    for run in found.keys() & set(gone):
        found[run]["status"] = GONE
    newest = newest or NewestFacts(connection)
    for name in dict.fromkeys(wanted):
        if name in FACTS:
            continue
        values = last_values(connection, name)
        if not values and not is_metric(connection, name):
            require_known(connection, name)
            values = {run: several[0] for run, several in newest.at(name).items()}
        for run in found.keys() & values.keys():
            found[run][name] = values[run]
    return list(found.values())


def run_names(connection: Connection) -> list[str]:
    """List the names of all runs."""
    return list(connection.execute(select(runs.c.name)).scalars())


def require_known(connection: Connection, name: str) -> None:
    """Refuse a name with which no path into the records of runs begins.

    Raises:
        ConfigError: no run has the name; names the nearest, metrics included.
    """
    known = recorded(connection)
    if known and name.partition(".")[0] not in known:
        raise ConfigError(f"no run has {name!r}; {nearest(name, known | _names(connection))}")


def is_metric(connection: Connection, name: str) -> bool:
    """Whether some run has a metric of this name, or "PHASE/NAME"."""
    found = select(series.c.id).where(_named(name)).limit(1)
    return connection.execute(found).first() is not None


def status(connection: Connection, gone: Collection[int]) -> ColumnElement[str]:
    """Return the present status of a run, as a column; `gone` has the keys of runs without directories."""
    return case((one_of(connection, runs.c.id, gone), GONE), else_=runs.c.status) if gone else runs.c.status


def recorded(connection: Connection) -> set[str]:
    """Return the names with which a path into the records of runs may begin."""
    deep = fields.c.path.contains(".") | fields.c.path.contains(ELEMENT)
    top = select(fields.c.path).where(~deep).distinct()
    return set(connection.execute(top).scalars())


def _names(connection: Connection) -> set[str]:
    return set(FACTS) | set(connection.execute(select(series.c.name).distinct()).scalars())


def last_values(connection: Connection, name: str) -> dict[int, float]:
    """Return run -> last value of a metric; see `selected_last_values`."""
    found = connection.execute(selected_last_values(name))
    return {run: math.nan if value is None else value for run, value in found}


def _named(name: str) -> ColumnElement[bool]:
    phase, _, bare = name.rpartition("/")
    named = series.c.name == short(name)
    return named | ((series.c.name == short(bare)) & (series.c.phase == short(phase))) if phase else named


def selected_last_values(name: str) -> Select[Any]:
    """Select (run, value): the last value of a metric, NULL for NaN, for every run with the metric.

    Args:
        name: the metric, in its phase of lowest rank, or "PHASE/NAME".
    """
    row = select(metrics.c.step).join(segments, valid())
    there = row.where(metrics.c.series == series.c.id, segments.c.run == series.c.run).correlate(series)
    order = (case(_PHASES, value=series.c.phase, else_=2), series.c.phase, series.c.name)
    place = func.row_number().over(partition_by=series.c.run, order_by=order).label("place")
    ranked = select(series.c.id, place).where(_named(name), there.exists()).subquery()
    chosen = select(series.c.run, _last(metrics.c.value).label("value"))
    return chosen.join(ranked, ranked.c.id == series.c.id).where(ranked.c.place == 1)


def _last(column: ColumnElement[Any]) -> Any:
    """Select the last valid value of a column of `metrics`, for the series of the outer query."""
    return (
        select(column)
        .join(segments, valid())
        .where(metrics.c.series == series.c.id, segments.c.run == series.c.run)
        .order_by(metrics.c.segment.desc(), metrics.c.offset.desc(), metrics.c.row.desc())
        .limit(1)
        .correlate(series)
        .scalar_subquery()
    )


def valid() -> ColumnElement[bool]:
    """Whether a row of `metrics` is valid, joined to the row of its segment in `segments`."""
    return (segments.c.number == metrics.c.segment) & (metrics.c.offset < segments.c.valid_to)


class NewestFacts:
    """Records of the newest starts; read once, and only if needed."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @cached_property
    def _facts(self) -> dict[int, dict[str, Any]]:
        return newest_facts(self._connection)

    def at(self, path: str) -> dict[int, list[Any]]:
        """Return run -> values to which a path leads, if there are any; lists and objects as JSON."""
        values = {run: values_at(facts, path) for run, facts in self._facts.items()}
        return {run: list(map(_plain, several)) for run, several in values.items() if several}


def leads_here(connection: Connection, path: str) -> ColumnElement[bool]:
    """Whether a requested path leads to a row of `fields`."""
    path = named(path)
    places = select(fields.c.path).distinct().where(fields.c.path.contains(ELEMENT))
    places = places.where(fields.c.path.startswith(path.partition(".")[0], autoescape=True))
    in_lists = [place for place in connection.execute(places).scalars() if leads(path, place)]
    return (fields.c.path == path) | one_of(connection, fields.c.path, in_lists)


def newest_facts(connection: Connection, of: Collection[int] | None = None) -> dict[int, dict[str, Any]]:
    """Return run -> facts of its newest start, for all runs or some."""
    begun = select(segments.c.run, segments.c.facts).where(segments.c.begun == 1).order_by(segments.c.number)
    if of is not None:
        begun = begun.where(one_of(connection, segments.c.run, of))
    newest = {run: text for run, text in connection.execute(begun)}
    return {run: json.loads(text) for run, text in newest.items()}


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list) else value


def find_run(
    connection: Connection, text: str, gone: Collection[int] = (), *, exactly: bool = False
) -> dict[str, Any]:
    """Find a run by its name, with or without the six digits, its directory's name, or a beginning.

    Args:
        gone: keys of runs whose directories do not exist any more: found only if no other run is.
        exactly: do not accept the beginning of a name.

    Returns:
        `FACTS`, and `id`, the run's key in the index.

    Raises:
        ConfigError: no run is found, or more than one.
    """
    found = [dict(row._mapping) for row in connection.execute(select(runs))]
    exact = [run for run in found if text in (run["name"], run["path"])]
    named = [run for run in found if is_named(run["name"], text) or Path(run["path"]).name == text]
    begins = [run for run in found if run["name"].startswith(text) and not exactly]
    for candidates in (exact, named, begins):
        there = [run for run in candidates if run["id"] not in gone] or candidates
        if len(there) == 1:
            return there[0]
        if there:
            names = ", ".join(sorted(run["name"] for run in there))
            raise ConfigError(f"{text!r} could mean several runs; give one of: {names}")
    raise ConfigError(f"there is no run {text!r}; {nearest(text, (run['name'] for run in found))}")


def metric_rows(connection: Connection, run: int, name: str, phase: str | None = None) -> list[Row]:
    """Return the valid rows of a run's metric, in the order in which they were written, phase by phase.

    Args:
        name: the metric, or "PHASE/NAME" for a single phase.

    Raises:
        ConfigError: the run has no such metric; names the nearest.
    """
    from everstep.record import Row

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
            .join(segments, valid())
            .where(metrics.c.series == key, segments.c.run == run)
            .order_by(metrics.c.segment, metrics.c.offset, metrics.c.row)
        ):
            segment, epoch, step, seq, value, count, wall = row
            value = math.nan if value is None else value
            rows.append(Row(segment, epoch, step, in_phase, called, seq, value, count, bool(wall)))
    return rows


def summaries(connection: Connection, run: int) -> list[Summary]:
    """Summarise the metrics of a run, those measured outside steps first."""
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
        .join(segments, valid() & (segments.c.run == series.c.run))
        .where(series.c.run == run)
        .group_by(series.c.id)
    )
    rows = [
        Summary(p, n, k, s, math.nan if v is None else v, low, high) for p, n, k, s, v, low, high in found
    ]
    return sorted(rows, key=lambda one: (_PHASES.get(one.phase, 2), one.phase, one.name))


def metric_names(connection: Connection, run: int) -> list[tuple[str, str]]:
    """List (phase, name) of every metric of a run."""
    found = connection.execute(select(series.c.phase, series.c.name).where(series.c.run == run))
    return [(phase, name) for phase, name in found]


def starts(connection: Connection, run: int) -> list[dict[str, Any]]:
    """List the starts of a run, the first start first; `facts` and `problems` as Python values."""
    found = connection.execute(select(segments).where(segments.c.run == run).order_by(segments.c.number))
    return [
        {
            **{name: value for name, value in row._mapping.items() if name not in ("run", "begun")},
            "facts": without_credentials(json.loads(row.facts)),
            "problems": json.loads(row.problems),
        }
        for row in found
    ]


def rollbacks(connection: Connection, run: int) -> list[Rollback]:
    """List the rollbacks of a run since it last began from nothing, in order."""
    from everstep.record import Rollback

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
