"""Columns of runs: a fact, the last or best value of a metric, a count over all starts, a recorded value."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Connection, RowMapping, func, select, tuple_

from everstep.contracts.metrics import better_when, phases_and_names
from everstep.display.cells import flat
from everstep.errors import ConfigError, nearest
from everstep.index.filters import CONTAINS, Leaf, Node, kind_of, matcher, values_at
from everstep.index.run_facts import COUNTS, FACTS, STATUSES
from everstep.index.run_queries import (
    badges_of,
    by_phase,
    finite,
    last_of_series,
    names_of,
    newest_facts,
    one_of,
    run_rows,
    short,
)
from everstep.index.sql_tables import facts, metrics, runs, segments, series, stored, valid_metrics
from everstep.labels import NAMES as LABELS

if TYPE_CHECKING:
    from everstep.index.database import Database
    from everstep.record.badges import Start

BEST = "best/"
"""Beginning of the names of columns of best values: "best/valid_loss", "best/tail/valid_loss" for a phase."""

RECORDED = frozenset(
    (
        *("config", "sweep", "parent", "git", "argv", "cwd", "packages", "services", "code", "controllers"),
        *("host", "platform", "python", "pid", "fingerprint", "backends", "seed", "ranks", "ranks_before"),
        *("data_ranks", "limits", "lock", "resume", "resumed_from", *LABELS),
    )
)
"""Names with which the paths into a start's record begin: where a run has one, no metric hides it."""

_MOST_READ = 100
"""Most runs whose records are read for a hint."""
_WORST_FIRST = ("diverged", "not verified", "verified")

ByMetric = dict[int, dict[tuple[str, str], float]]
"""Run -> (phase, name) -> value; the phase that a bare name means comes first."""


class RunColumns:
    """Columns of all runs; each is read when it is first needed.

    Args:
        index: a connection with its transaction, or the database, of which each column is read by itself.
        gone: keys of runs whose directories do not exist any more.

    Attributes:
        rows: key of a run -> its row in the table `runs`, the newest start last.
    """

    def __init__(self, index: Connection | Database, gone: Collection[int] = ()) -> None:
        self._index = index
        self._columns: dict[str, dict[int, list[Any]]] = {}
        self._sources: dict[str, str] = {}
        """Name of a column -> "recorded", "last", "count" or "best"."""
        self._facts: dict[str, dict[int, dict[str, Any]]] = {}
        with self._reading() as connection:
            self.rows = run_rows(connection, gone)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Connection]:
        if isinstance(self._index, Connection):
            yield self._index
        else:
            with self._index.read() as connection:
                yield connection

    def find(self, node: Node) -> list[dict[str, Any]]:
        """Return the rows of the runs for which a filter holds."""
        holds = matcher(node)
        return [
            row
            for run, row in self.rows.items()
            if holds(lambda path, run=run: self.values(path).get(run, ()))  # type: ignore[misc]
        ]

    def values(self, name: str) -> Mapping[int, list[Any]]:
        """Return run -> values of a name, of those runs that have any."""
        if name in ("name", "run"):
            return {run: names_of(row["name"]) for run, row in self.rows.items()}
        if name in FACTS:
            return {run: [row[name]] for run, row in self.rows.items()}
        if name not in self._columns:
            with self._reading() as connection:
                self._columns[name], self._sources[name] = self._read(connection, name)
        return self._columns[name]

    def first(self, name: str) -> dict[int, Any]:
        """Return run -> first value of a name; lists and objects as JSON."""
        return {
            run: json.dumps(values[0]) if isinstance(values[0], list | dict) else values[0]
            for run, values in self.values(name).items()
        }

    def add(self, rows: Iterable[dict[str, Any]], names: Iterable[str]) -> None:
        """Give some rows the first values of some names."""
        for name in dict.fromkeys(names):
            if name not in FACTS:
                column = self.first(name)
                for row in rows:
                    row.update({name: column[row["id"]]} if row["id"] in column else {})

    def _read(self, connection: Connection, name: str) -> tuple[dict[int, list[Any]], str]:
        """Return a column, and what it is."""
        recorded = self._recorded(connection, name)
        if recorded and name.partition(".")[0] in RECORDED:
            return recorded, "recorded"
        if last := last_values_of(connection, metric=name):
            return {run: [next(iter(values.values()))] for run, values in last.items()}, "last"
        if name in COUNTS:
            counted = counts(connection)
            return {run: [count[name]] for run, count in counted.items() if name in count}, "count"
        if not recorded and name.startswith(BEST):
            best = best_of(connection, name.removeprefix(BEST))
            return {run: [value] for run, value in best.items()}, "best"
        return recorded, "recorded"

    def _recorded(self, connection: Connection, path: str) -> dict[int, list[Any]]:
        top = path.partition(".")[0]
        if top not in self._facts:
            self._facts[top] = newest_facts(connection, names=[top])
        values = {run: values_at(tree, path) for run, tree in self._facts[top].items()}
        return {run: each for run, each in values.items() if each}

    # ---------------------------------------------------------------------------- checks

    def require(self, conditions: Iterable[Leaf], names: Iterable[str] = ()) -> None:
        """Refuse a question that no run can answer, which most likely has a slip.

        Args:
            conditions: those on missing values may name what no run has.
            names: further names, to sort by or to show.
        """
        conditions = list(conditions)
        asked = [leaf.path for leaf in conditions if not leaf.about_missing]
        for name in dict.fromkeys([*asked, *names]):
            self._require_name(name)
        for leaf in conditions:
            texts = [value for value in leaf.values if isinstance(value, str)]
            if not texts or len(texts) < len(leaf.values) or leaf.operator == CONTAINS:
                continue
            kinds = {kind_of(value) for values in self.values(leaf.path).values() for value in values}
            if kinds - {"null"} == {"number"}:
                raise ConfigError(f"{leaf.path} is a number; compare it with a number, not with {texts[0]!r}")
            unknown = [text for text in texts if text not in STATUSES]
            if leaf.path == "status" and leaf.operator in ("$eq", "$in") and unknown:
                raise ConfigError(f"there is no status {unknown[0]!r}; {nearest(unknown[0], STATUSES)}")

    def _require_name(self, name: str) -> None:
        if not self.rows or name in (*FACTS, *COUNTS, *LABELS) or self.values(name):
            return
        above = name.rpartition(".")[0]
        while above and not self.values(above):
            above = above.rpartition(".")[0]
        if above and all(value is None for values in self.values(above).values() for value in values):
            return  # as `git` of runs outside a repository
        beside = {path for path in self.paths if above and path.startswith(f"{above}.")}
        with self._reading() as connection:
            tops = connection.execute(select(facts.c.name).distinct()).scalars().all()
        metrics = {metric for _, metric in self.metric_counts}
        known = beside or {*FACTS, *COUNTS, *tops, *metrics, *([above] if above else [])}
        meant = self.setting(name)
        hint = nearest(name, known) if meant is None else f"did you mean {meant!r}?"
        raise ConfigError(f"no run has {name!r}; {hint}")

    @cached_property
    def metric_counts(self) -> dict[tuple[str, str], int]:
        """(phase, name) of each metric -> number of runs that have it."""
        counted = select(series.c.phase, series.c.name, func.count()).group_by(series.c.phase, series.c.name)
        with self._reading() as connection:
            return {(phase, name): count for phase, name, count in connection.execute(counted)}

    def telling_metric(self) -> str | None:
        """Return the metric that tells most: one of validation, if there is any, that most runs have."""
        counted: Counter[str] = Counter()
        for (_, name), count in self.metric_counts.items():
            if not name.endswith("time"):
                counted[name] += count
        return max(
            counted,
            key=lambda name: (name.startswith(("val", "eval", "test")), counted[name], "loss" in name),
            default=None,
        )

    @cached_property
    def paths(self) -> set[str]:
        """Paths into the records of the newest runs."""
        with self._reading() as connection:
            newest = newest_facts(connection, list(self.rows)[-_MOST_READ:])
        return {path for tree in newest.values() for path in _paths_in(tree)}

    def setting(self, name: str) -> str | None:
        """Return the shortest path that ends with a name, those of the config first; or None."""
        found = [path for path in self.paths if path.endswith(f".{name}")]
        return min(found, key=lambda path: (not path.startswith("config."), len(path), path), default=None)

    def taken_for_metrics(self, names: Iterable[str]) -> list[str]:
        """Say of each bare name that is both a metric and a setting how the setting is written."""
        metrics = {metric for _, metric in self.metric_counts}
        settings = {
            name: self.setting(name)
            for name in dict.fromkeys(names)
            if "/" not in name and name not in FACTS and name in metrics
        }
        return [
            f"{name} is the last value of the metric {name!r}; for the setting write {setting}"
            for name, setting in settings.items()
            if setting is not None and setting.startswith("config.")
        ]


def _paths_in(tree: Mapping[str, Any]) -> Iterable[str]:
    for path, value in flat(tree):
        yield path
        for item in value if isinstance(value, list) else ():
            if isinstance(item, dict):
                yield from (f"{path}.{below}" for below in _paths_in(item))


# ----------------------------------------------------------------------------- values of metrics


def named_series(name: str) -> ColumnElement[bool]:
    """Whether a row of `series` is of a metric, or of "PHASE/NAME"."""
    pairs = [(short(phase), short(bare)) for phase, bare in phases_and_names(name)]
    named = series.c.name == short(name)
    return named | tuple_(series.c.phase, series.c.name).in_(pairs) if pairs else named


def last_values_of(
    connection: Connection, of: Collection[int] | None = None, metric: str | None = None
) -> ByMetric:
    """Return the last value of each metric.

    Args:
        of: keys of the runs; None for all.
        metric: a metric, or "PHASE/NAME"; None for all.
    """
    last = last_of_series(metrics.c.step).label("step"), last_of_series(metrics.c.value).label("value")
    chosen = select(series.c.run, series.c.phase, series.c.name, *last)
    if of is not None:
        chosen = chosen.where(one_of(connection, series.c.run, of))
    if metric is not None:
        chosen = chosen.where(named_series(metric))
    found: ByMetric = {}
    for run, phase, name, step, value in sorted(connection.execute(chosen), key=lambda row: by_phase(row[1])):
        if step is not None:
            found.setdefault(run, {})[phase, name] = math.nan if value is None else value
    return found


def best_of(connection: Connection, metric: str) -> dict[int, float]:
    """Return run -> best finite value of a metric, or "PHASE/NAME", whose name tells which value is better.

    Metrics of single steps are left out: they do not measure a run.
    """
    better, value = better_when(metric), valid_metrics.c.value
    extreme = (func.max if better == "max" else func.min)(value).filter(finite())
    chosen = select(series.c.run, series.c.phase, extreme).group_by(series.c.id)
    chosen = chosen.join(valid_metrics, valid_metrics.c.series == series.c.id)
    chosen = chosen.where(series.c.phase.not_in(("step", "head")), named_series(metric))
    rows = sorted(connection.execute(chosen), key=lambda row: by_phase(row.phase), reverse=True)
    if rows and better is None:
        raise ConfigError(
            f"the name does not tell whether a smaller or a larger {metric!r} is better; "
            f"names that end in loss, acc or accuracy do: give {metric!r} for the last value"
        )
    # the phase that a bare name means comes last, and counts
    return {run: best for run, _, best in rows if best is not None}


# ------------------------------------------------------------------------------ counts of starts


def counts(connection: Connection) -> dict[int, dict[str, Any]]:
    """Return run -> {starts, kills, verified}.

    `verified` is the worst that is known of the run's resumes: diverged, not verified, verified; without a
    resume that executed a step it is missing.
    """
    begun = select(*(segments.c[name] for name in ("run", "number", "status", "step", "facts")))
    begun = begun.add_columns(runs.c.status.label("now")).join(runs, runs.c.id == segments.c.run)
    begun = begun.where(segments.c.begun == 1, func.coalesce(segments.c.status, "") != "accepted")
    reported = badges_of(connection)
    found: dict[int, list[RowMapping]] = {}
    for row in connection.execute(begun.order_by(segments.c.run, segments.c.number)).mappings():
        found.setdefault(row["run"], []).append(row)
    return {run: _counted(starts, reported.get(run, {})) for run, starts in found.items()}


def _counted(begun: list[RowMapping], reported: Mapping[int, Any]) -> dict[str, Any]:
    from everstep.record.badges import judged

    ends = [start["status"] or "killed" for start in begun[:-1]] + [begun[-1]["status"] or begun[-1]["now"]]
    known = [_known(start, end) for start, end in zip(begun, ends, strict=True)]
    if ends[-1] == "killed":
        known[-1] = known[-1]._replace(reached=None)  # a trail in its directory may tell; the index does not
    kinds = {badge.kind for _, badge in judged(known, reported)}
    count: dict[str, Any] = {"starts": len(begun), "kills": ends.count("killed")}
    worst = next((kind for kind in _WORST_FIRST if kind in kinds), None)
    return count if worst is None else {**count, "verified": worst}


def _known(start: RowMapping, end: str) -> Start:
    from everstep.record.badges import Start
    from everstep.record.segment_file import step_of

    came = stored(start["facts"]).get("resumed_from")
    began = None if came is None else step_of(came)
    return Start(start["number"], began, start["step"], end == "running")
