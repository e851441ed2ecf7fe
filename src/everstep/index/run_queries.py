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

from everstep.contracts.metrics import better_when
from everstep.errors import ConfigError, nearest
from everstep.index.run_facts import GONE
from everstep.index.sql_tables import (
    events,
    facts,
    metrics,
    runs,
    segments,
    series,
    stored,
    valid_metrics,
)
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
        .join(segments, (segments.c.number == metrics.c.segment) & (metrics.c.offset < segments.c.valid_to))
        .where(metrics.c.series == series.c.id, segments.c.run == series.c.run)
        .order_by(metrics.c.segment.desc(), metrics.c.offset.desc(), metrics.c.row.desc())
        .limit(1)
        .correlate(series)
        .scalar_subquery()
    )


def finite() -> ColumnElement[bool]:
    """Whether a value of `valid_metrics` is finite; infinities are stored, NaN is NULL."""
    return valid_metrics.c.value.between(-1.7976931348623157e308, 1.7976931348623157e308)


def newest_facts(
    connection: Connection, of: Collection[int] | None = None, names: Collection[str] = ()
) -> dict[int, dict[str, Any]]:
    """Return run -> facts of its newest start and its labels.

    Args:
        of: keys of the runs; None for all.
        names: of the facts; all if empty.
    """
    chosen = select(facts.c.run, facts.c.name, facts.c.value)
    if of is not None:
        chosen = chosen.where(one_of(connection, facts.c.run, of))
    if names:
        chosen = chosen.where(facts.c.name.in_(names))
    found: dict[int, dict[str, Any]] = {}
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
    """
    from everstep.record import Row

    known = metric_names(connection, run)
    chosen = [one for one in known if name in (one[1], "/".join(one)) and phase in (None, one[0])]
    if not chosen:
        where = "" if phase is None else f" in phase {phase!r}"
        names = {name for _, name in known} | {"/".join(one) for one in known}
        raise ConfigError(f"the run has no metric {name!r}{where}; {nearest(name, names)}")
    m = valid_metrics.c
    written = m.segment, m.offset, m.row
    columns = m.segment, m.epoch, m.step, m.phase, m.name, m.seq, m.value, m["count"], m.wall
    rows = []
    for one in chosen:
        mine = (m.run_id == run) & (m.phase == one[0]) & (m.name == one[1])
        for row in connection.execute(select(*columns).where(mine).order_by(*written)):
            value = math.nan if row.value is None else row.value
            rows.append(Row(*row)._replace(value=value, wall=bool(row.wall)))
    return rows


def best_values(connection: Connection, run: int) -> dict[tuple[str, str], tuple[float, int]]:
    """Return (phase, name) -> best finite value and its step, if the name says which direction is better.

    Metrics of single steps are left out: they do not measure a run.  Metrics of the tail come first.
    """
    m, best = valid_metrics.c, {}
    for phase, name in metric_names(connection, run):
        better = better_when(name)
        if better is not None and phase not in ("step", "head"):
            mine = (m.run_id == run) & (m.phase == phase) & (m.name == name) & finite()
            order = m.value if better == "min" else m.value.desc(), m.segment, m.offset, m.row
            row = connection.execute(select(m.value, m.step).where(mine).order_by(*order).limit(1)).first()
            if row is not None:
                best[phase, name] = float(row.value), int(row.step)
    return best


def summaries(connection: Connection, run: int) -> list[Summary]:
    """Summarise the metrics of a run, those measured outside steps first."""
    value = valid_metrics.c.value
    extremes = func.min(value).filter(finite()), func.max(value).filter(finite())
    last = last_of_series(metrics.c.step), last_of_series(metrics.c.value)
    chosen = select(series.c.phase, series.c.name, func.count(valid_metrics.c.step), *last, *extremes)
    chosen = chosen.join(valid_metrics, valid_metrics.c.series == series.c.id)
    found = connection.execute(chosen.where(series.c.run == run).group_by(series.c.id))
    rows = [Summary._make([*row[:4], math.nan if row[4] is None else row[4], *row[5:]]) for row in found]
    return sorted(rows, key=lambda one: (by_phase(one.phase), one.name))


def metric_names(connection: Connection, run: int) -> list[tuple[str, str]]:
    """List (phase, name) of every metric of a run, those measured outside steps first."""
    found = connection.execute(select(series.c.phase, series.c.name).where(series.c.run == run))
    return sorted(((p, n) for p, n in found), key=lambda one: (by_phase(one[0]), one[1]))


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
