"""SQL queries for runs, and for the rows of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Select, case, func, select, tuple_

from everstep.contracts.metrics import phases_and_names
from everstep.errors import ConfigError, alike, nearest
from everstep.index.fields import ELEMENT, leads, named, short, values_at
from everstep.index.filters import is_named
from everstep.index.run_facts import COUNTS, FACTS, GONE
from everstep.index.sql_tables import events, fields, is_label, metrics, runs, segments, series
from everstep.index.stored_json import stored
from everstep.index.translate import one_of
from everstep.labels import NAMES as LABELS
from everstep.redaction import without_credentials

if TYPE_CHECKING:
    from everstep.record import Rollback, Row  # it brings NumPy, which a list of runs does not need
    from everstep.record.badges import Badge

RECORDED = frozenset(
    (
        *("config", "sweep", "parent", "git", "argv", "cwd", "packages", "services", "code", "controllers"),
        *("host", "platform", "python", "pid", "fingerprint", "backends", "seed", "ranks", "ranks_before"),
        *("data_ranks", "limits", "lock", "resume", "resumed_from", "imported", *LABELS),
    )
)
"""Names with which the paths into a start's record begin."""

_PHASES = {"tail": 0, "epoch": 1, "step": 3, "head": 4}
"""Rank of phases (evaluations: 2): a metric's bare name means its phase of lowest rank."""


def by_phase(phase: str) -> tuple[int, str]:
    """Return a key that sorts phases, that of lowest rank first."""
    return _PHASES.get(phase, 2), phase


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


def run_rows(
    connection: Connection, gone: Collection[int], where: ColumnElement[bool] | None = None
) -> dict[int, dict[str, Any]]:
    """Map the key of each run to its row in the table `runs`, the newest start last.

    Args:
        gone: keys of runs whose directories do not exist any more; their status is `GONE`.
        where: condition that selects runs; None for all.
    """
    chosen = select(runs).order_by(runs.c.started.nulls_first(), runs.c.name)
    if where is not None:
        chosen = chosen.where(where)
    found = {row["id"]: dict(row) for row in connection.execute(chosen).mappings()}
    for run in found.keys() & set(gone):
        found[run]["status"] = GONE
    return found


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
    found = run_rows(connection, gone, where)
    newest = newest or NewestFacts(connection)
    for name in dict.fromkeys(wanted):
        if name in FACTS:
            continue
        if is_metric(connection, name):
            values: dict[int, Any] = dict(last_values(connection, name))
        else:
            require_known(connection, name)
            values = {run: several[0] for run, several in newest.at(name).items()}
        for run in found.keys() & values.keys():
            found[run][name] = values[run]
    return list(found.values())


def ranks_of(connection: Connection) -> dict[int, int]:
    """Return run -> number of ranks of its newest start."""
    told = select(fields.c.run, fields.c.number).where(fields.c.path == "ranks", fields.c.kind == "number")
    return {run: int(number) for run, number in connection.execute(told)}


def run_names(connection: Connection) -> list[str]:
    """List the names of all runs."""
    return list(connection.execute(select(runs.c.name)).scalars())


def require_known(connection: Connection, name: str) -> None:
    """Refuse a name with which no path into the records of runs begins.

    Raises:
        ConfigError: no run has the name; names the nearest, metrics included.
    """
    known = recorded(connection)
    if known and name.partition(".")[0] not in known | {*LABELS}:
        meant = _ending_with(connection, name)
        known |= _names(connection)
        if meant is None and not alike(name, known):  # a slip in the last part of a setting's name
            near = get_close_matches(name.rpartition(".")[2], _last_parts(connection), n=1, cutoff=0.75)
            meant = _ending_with(connection, near[0]) if near else _containing(connection, name)
        hint = nearest(name, known) if meant is None else f"did you mean {meant!r}?"
        raise ConfigError(f"no run has {name!r}; {hint}")


def _containing(connection: Connection, name: str) -> str | None:
    """Return the shortest metric of whose name a name of three or more characters is a part."""
    found = [one for one in _names(connection) if len(name) > 2 and name.lower() in one.lower()]
    return min(found, key=lambda one: (len(one), one), default=None)


def _ending_with(connection: Connection, name: str) -> str | None:
    """Return the shortest path that ends with a name, those of the config first; None if there is none."""
    below = fields.c.path.endswith(f".{named(name)}", autoescape=True)
    paths = connection.execute(select(fields.c.path).where(below).distinct()).scalars()
    found = [path for path in paths if ELEMENT not in path]
    return min(found, key=lambda path: (not path.startswith("config."), len(path), path), default=None)


def _last_parts(connection: Connection) -> set[str]:
    """Return the last parts of the names of all settings."""
    below = select(fields.c.path).where(fields.c.path.startswith("config.")).distinct()
    return {path.rpartition(".")[2] for path in connection.execute(below).scalars() if ELEMENT not in path}


def taken_for_metrics(connection: Connection, names: Iterable[str]) -> list[str]:
    """Say of each bare name that is both a metric and a setting how the setting is written."""
    settings = {name: _ending_with(connection, name) for name in dict.fromkeys(names) if "/" not in name}
    return [
        taken_for_metric(name, setting)
        for name, setting in settings.items()
        if setting and setting.startswith("config.") and name not in FACTS and is_metric(connection, name)
    ]


def taken_for_metric(name: str, setting: str) -> str:
    """Say that a name was taken for a metric, and how the setting of the same name is written."""
    return f"{name} is the last value of the metric {name!r}; for the setting write {setting}"


def is_recorded(name: str) -> bool:
    """Whether a name is one that everstep records: where a run has it, no metric of another run hides it."""
    return name.partition(".")[0] in RECORDED


def is_metric(connection: Connection, name: str) -> bool:
    """Whether some run has a metric of this name, or "PHASE/NAME", and none has recorded the name."""
    if is_recorded(name):
        there = connection.execute(select(fields.c.run).where(leads_here(connection, name)).limit(1))
        if there.first() is not None:
            return False
    found = select(series.c.id).where(named_series(name)).limit(1)
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
    return {*FACTS, *COUNTS} | set(connection.execute(select(series.c.name).distinct()).scalars())


def last_values(connection: Connection, name: str) -> dict[int, float]:
    """Return run -> last value of a metric; see `selected_last_values`."""
    found = connection.execute(selected_last_values(name))
    return {run: math.nan if value is None else value for run, value in found}


def last_values_of(connection: Connection, of: Collection[int]) -> dict[int, dict[tuple[str, str], float]]:
    """Return run -> (phase, name) -> last value of each metric, the phase of lowest rank first.

    Args:
        of: keys of the runs.
    """
    last = _last(metrics.c.step).label("step"), _last(metrics.c.value).label("value")
    chosen = select(series.c.run, series.c.phase, series.c.name, *last)
    found: dict[int, dict[tuple[str, str], float]] = {}
    rows = connection.execute(chosen.where(one_of(connection, series.c.run, of))).all()
    for run, phase, name, step, value in sorted(rows, key=lambda row: by_phase(row[1])):
        if step is not None:
            found.setdefault(run, {})[phase, name] = math.nan if value is None else value
    return found


def named_series(name: str) -> ColumnElement[bool]:
    """Whether a row of `series` is of a metric, or of "PHASE/NAME"."""
    pairs = [(short(phase), short(bare)) for phase, bare in phases_and_names(name)]
    named = series.c.name == short(name)
    return named | tuple_(series.c.phase, series.c.name).in_(pairs) if pairs else named


def selected_last_values(name: str) -> Select[Any]:
    """Select (run, value): the last value of a metric, NULL for NaN, for every run with the metric.

    Args:
        name: the metric, in its phase of lowest rank, or "PHASE/NAME".
    """
    row = select(metrics.c.step).join(segments, valid())
    there = row.where(metrics.c.series == series.c.id, segments.c.run == series.c.run).correlate(series)
    order = (case(_PHASES, value=series.c.phase, else_=2), series.c.phase, series.c.name)
    place = func.row_number().over(partition_by=series.c.run, order_by=order).label("place")
    ranked = select(series.c.id, place).where(named_series(name), there.exists()).subquery()
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


def finite() -> ColumnElement[bool]:
    """Whether the value of a row of `metrics` is finite; infinities are stored, NaN is NULL."""
    return metrics.c.value.between(-1.7976931348623157e308, 1.7976931348623157e308)


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
    return {run: stored(text) for run, text in newest.items()}


def labels_of(connection: Connection) -> dict[int, dict[str, str]]:
    """Return run -> name of a label -> its text, JSON for tags; people change these while a start goes on."""
    found: dict[int, dict[str, str]] = {}
    told = select(fields.c.run, fields.c.path, fields.c.text).where(is_label)
    for run, name, text in connection.execute(told):
        found.setdefault(run, {})[name] = text
    return found


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list) else value


def find_run(
    connection: Connection,
    text: str,
    is_gone: Callable[[dict[str, Any]], bool] = lambda run: False,
    *,
    exactly: bool = False,
    place: str = "that was read",
) -> dict[str, Any]:
    """Find a run by its name, with or without the six digits, its directory's name, or a beginning.

    Args:
        is_gone: whether the directory of a run does not exist any more: it is found only if no other run is.
        exactly: do not accept the beginning of a name.
        place: name of the index in messages.

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
        there = [run for run in candidates if not is_gone(run)] or candidates
        if len(there) == 1:
            return there[0]
        if there:
            names = ", ".join(sorted(run["name"] for run in there))
            raise ConfigError(f"{text!r} could mean several runs; give one of: {names}")
    raise ConfigError(
        f"there is no run {text!r} in the index {place}, and no run directory at that path; give the "
        f"directory of a run, or name another index; {nearest(text, (run['name'] for run in found))}"
    )


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
    for key, in_phase, called in sorted(chosen, key=lambda one: by_phase(one[1])):
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


def extreme(
    connection: Connection, run: int, phase: str, name: str, *, smallest: bool
) -> tuple[float, int] | None:
    """Return a metric's smallest or largest finite value, and the step of its first valid row."""
    value = metrics.c.value
    row = connection.execute(
        select(value, metrics.c.step)
        .join(series, metrics.c.series == series.c.id)
        .join(segments, valid() & (segments.c.run == series.c.run))
        .where(series.c.run == run, series.c.phase == phase, series.c.name == name, finite())
        .order_by(value if smallest else value.desc(), metrics.c.segment, metrics.c.offset, metrics.c.row)
        .limit(1)
    ).one_or_none()
    return None if row is None else (float(row.value), int(row.step))


def summaries(connection: Connection, run: int) -> list[Summary]:
    """Summarise the metrics of a run, those measured outside steps first."""
    found = connection.execute(
        select(
            series.c.phase,
            series.c.name,
            func.count(metrics.c.step),
            _last(metrics.c.step),
            _last(metrics.c.value),
            func.min(metrics.c.value).filter(finite()),
            func.max(metrics.c.value).filter(finite()),
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
    """List (phase, name) of every metric of a run, those measured outside steps first."""
    found = connection.execute(select(series.c.phase, series.c.name).where(series.c.run == run))
    return sorted(((p, n) for p, n in found), key=lambda one: (_PHASES.get(one[0], 2), one))


def starts(connection: Connection, run: int) -> list[dict[str, Any]]:
    """List the starts of a run, the first start first; `facts` and `problems` as Python values."""
    asked = select(segments).where(segments.c.run == run).order_by(segments.c.number)
    found = connection.execute(asked).all()
    numbers = {row.number for row in found}
    return [
        {
            **{name: value for name, value in row._mapping.items() if name not in ("run", "begun")},
            "facts": without_credentials(stored(row.facts)),
            "problems": stored(row.problems, list) + lost_parent(row.number, row.parent, numbers),
        }
        for row in found
    ]


def lost_parent(number: int, parent: int | None, numbers: Collection[int]) -> list[str]:
    """Say that the file is gone which a start continues: the run has fewer rows than it had.

    Args:
        parent: number of the start that it continues; None if it began from nothing.
        numbers: the starts whose files were found.
    """
    if parent is None or parent in numbers:
        return []
    return [
        f"segment-{number:04d}.evj continues segment-{parent:04d}.evj, which is missing: its metrics are not "
        "shown; restore the file from a copy"
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
    return Rollback.among((stored(row.data), row.segment) for row in found)


def badges(connection: Connection, run: int) -> dict[int, Badge]:
    """Return the badge of each start that has reported one, by the start's number."""
    return badges_of(connection, [run]).get(run, {})


def badges_of(connection: Connection, of: Collection[int] | None = None) -> dict[int, dict[int, Badge]]:
    """Return run -> start -> badge of each start that has reported one, for all runs or some."""
    from everstep.record.badges import badges_in

    told = select(events.c.run, events.c.segment, events.c.kind, events.c.data).where(
        events.c.kind.in_(("verified", "diverged"))
    )
    if of is not None:
        told = told.where(one_of(connection, events.c.run, of))
    rows = connection.execute(told.order_by(events.c.run, events.c.segment, events.c.offset))
    return {
        run: badges_in((row.segment, row.kind, stored(row.data)) for row in mine)
        for run, mine in groupby(rows, lambda row: row.run)
    }
