"""SQL queries for runs, and for the rows of a run."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Integer, Text, cast, false, func, literal, select

from everstep.errors import ConfigError, nearest
from everstep.index.run_facts import GONE
from everstep.index.sql_tables import events, facts, metrics, runs, segments, series, stored
from everstep.labels import NAMES as LABELS
from everstep.redaction import without_credentials

if TYPE_CHECKING:
    from everstep.record import Rollback, Row  # it brings NumPy, which a list of runs does not need
    from everstep.record.badges import Badge

LONGEST_NAME = 250
"""Most characters of a metric's name in the index: databases limit the length of a key."""

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


def clean(text: str) -> str:
    """Replace the characters that a database refuses: lone surrogates, and NUL."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def short(name: str) -> str:
    """Shorten the name of a metric or phase to `LONGEST_NAME` characters, and a hash."""
    name = clean(name)
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}...{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def one_of(connection: Connection, source: ColumnElement[Any], values: Iterable[Any]) -> ColumnElement[bool]:
    """Whether a column's value is among some numbers or strings, of which there may be any number."""
    values = list(values)
    if not values:
        return false()
    listed = literal(json.dumps(values), Text)
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects.postgresql import JSONB

        items = func.jsonb_array_elements_text(cast(listed, JSONB)).table_valued("value")
    else:
        items = func.json_each(listed).table_valued("value")
    return source.in_(select(cast(items.c.value, Text if isinstance(values[0], str) else Integer)))


def run_rows(connection: Connection, gone: Collection[int] = ()) -> dict[int, dict[str, Any]]:
    """Map the key of each run to its row in the table `runs`, the newest start last.

    Args:
        gone: keys of runs whose directories do not exist any more; their status is `GONE`.
    """
    chosen = select(runs).order_by(runs.c.started.nulls_first(), runs.c.name)
    found = {row["id"]: dict(row) for row in connection.execute(chosen).mappings()}
    for run in found.keys() & set(gone):
        found[run]["status"] = GONE
    return found


def names_of(name: str) -> list[str]:
    """Return the names that mean a run: with and without the six digits at its end."""
    return list(dict.fromkeys((name, re.sub("-[0-9a-f]{6}$", "", name))))


def run_names(connection: Connection) -> list[str]:
    """List the names of all runs."""
    return list(connection.execute(select(runs.c.name)).scalars())


def last_of_series(column: ColumnElement[Any]) -> Any:
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


def newest_facts(connection: Connection, of: Collection[int] | None = None) -> dict[int, dict[str, Any]]:
    """Return run -> facts of its newest start and its labels, for all runs or some."""
    chosen = select(facts.c.run, facts.c.name, facts.c.value)
    if of is not None:
        chosen = chosen.where(one_of(connection, facts.c.run, of))
    found: dict[int, dict[str, Any]] = {}
    for run, name, text in connection.execute(chosen):
        found.setdefault(run, {})[name] = stored(text, object)
    return found


def labels_of(connection: Connection) -> dict[int, dict[str, Any]]:
    """Return run -> name of a label -> its value; people change these while a start goes on."""
    found: dict[int, dict[str, Any]] = {}
    chosen = select(facts.c.run, facts.c.name, facts.c.value).where(facts.c.name.in_(LABELS))
    for run, name, text in connection.execute(chosen):
        found.setdefault(run, {})[name] = stored(text, object)
    return found


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
    named = [run for run in found if text in (*names_of(run["name"]), Path(run["path"]).name)]
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
            last_of_series(metrics.c.step),
            last_of_series(metrics.c.value),
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
