"""Columns of runs: a fact, the last or best value of a metric, a count over all starts, a recorded value."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from sqlalchemy import ColumnElement, Connection, RowMapping, func, select, tuple_

from everstep.contracts.metrics import better_when, phases_and_names
from everstep.display.cells import flat
from everstep.errors import ConfigError, nearest
from everstep.index.filters import Leaf, Node, kind_of, matcher, values_at
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
    """Columns of all runs: each is read when it is first needed, and kept up to date by `refresh`.

    Args:
        index: a connection with its transaction, or the database, of which each column is read by itself.
        gone: keys of runs whose directories do not exist any more.

    Attributes:
        rows: key of a run -> its row in the table `runs`, the newest start last.
    """

    _of_records: ClassVar[tuple[str, ...]] = ("paths",)
    """Cached properties that follow from the records of the runs."""

    def __init__(self, index: Connection | Database, gone: Collection[int] = ()) -> None:
        self._index = index
        self._lock = threading.RLock()
        self._columns: dict[str, dict[int, list[Any]]] = {}
        self._sources: dict[str, str] = {}
        """Name of a column -> "recorded", "last", "count" or "best"."""
        self._facts: dict[str, dict[int, dict[str, Any]]] = {}
        self._sizes: dict[int, int] = {}
        self._labels: dict[int, dict[str, Any]] = {}
        self.rows = run_rows(index, gone) if isinstance(index, Connection) else {}

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
        with self._lock:
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

    def _read(
        self, connection: Connection, name: str, of: Collection[int] | None = None
    ) -> tuple[dict[int, list[Any]], str]:
        """Return a column, of all runs or some, and what it is."""
        recorded = self._recorded(connection, name, of)
        if recorded and is_recorded(name):
            return recorded, "recorded"
        if last := last_values_of(connection, of, metric=name):
            return {run: [next(iter(values.values()))] for run, values in last.items()}, "last"
        if name in COUNTS:
            counted = counts(connection, of)
            return {run: [count[name]] for run, count in counted.items() if name in count}, "count"
        if not recorded and name.startswith(BEST):
            best = best_of(connection, of, metric=name.removeprefix(BEST))
            return {run: [next(iter(values.values()))] for run, values in best.items()}, "best"
        return recorded, "recorded"

    def _recorded(
        self, connection: Connection, path: str, of: Collection[int] | None = None
    ) -> dict[int, list[Any]]:
        top = path.partition(".")[0]
        if top not in self._facts:
            self._facts[top] = newest_facts(connection, names=[top])
        trees = self._facts[top]
        found = {run: values_at(trees[run], path) for run in (trees if of is None else trees.keys() & {*of})}
        return {run: values for run, values in found.items() if values}

    def refresh(self, connection: Connection, gone: Collection[int] = ()) -> tuple[list[int], dict[int, int]]:
        """Read what has changed in the index since the last call.

        Returns:
            The keys of the runs that have changed, those that are not there any more included; and of the
            runs whose journal grew, key -> bytes of it.
        """
        rows = run_rows(connection, gone)
        sized = select(segments.c.run, func.sum(segments.c.size)).group_by(segments.c.run)
        sizes = {run: int(size) for run, size in connection.execute(sized)}
        labels = newest_facts(connection, names=LABELS)
        before = self.rows
        grown = {run: sizes.get(run, 0) for run in rows if sizes.get(run) != self._sizes.get(run)}
        told = [run for run in rows if labels.get(run) != self._labels.get(run)]
        begun = {*told, *(run for run in rows if before.get(run, {}).get("started") != rows[run]["started"])}
        changed = [run for run in rows if run in grown or run in begun or before.get(run) != rows[run]]
        changed += before.keys() - rows.keys()
        stale, renewed = {*changed}, bool(begun or before.keys() - rows.keys())
        with self._lock:
            for top, trees in self._facts.items() if renewed else ():
                fresh = newest_facts(connection, stale, names=[top])
                self._facts[top] = {run: tree for run, tree in trees.items() if run not in stale} | fresh
            for name, column in list(self._columns.items()) if stale else ():
                read, source = self._read(connection, name, stale) if column else ({}, "")
                if column and (not read or source == self._sources[name]):
                    kept = {run: values for run, values in column.items() if run not in stale}
                    self._columns[name] = kept | read
                else:
                    del self._columns[name]  # it may mean something else now
            for name in (*(("metric_counts",) if stale else ()), *(self._of_records if renewed else ())):
                self.__dict__.pop(name, None)
            self.rows, self._sizes, self._labels = rows, sizes, labels
        return changed, grown

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
            if not texts or len(texts) < len(leaf.values) or leaf.operator == "$regex":
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
    def paths(self) -> Counter[str]:
        """Path into the records of the newest runs -> number of these that have it."""
        with self._reading() as connection:
            newest = newest_facts(connection, list(self.rows)[-_MOST_READ:])
        return Counter(path for tree in newest.values() for path in dict.fromkeys(_paths_in(tree)))

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


def is_recorded(name: str) -> bool:
    """Whether a name is one that everstep records: where a run has it, no metric of another run hides it."""
    return name.partition(".")[0] in RECORDED


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
    chosen = _chosen(select(series.c.run, series.c.phase, series.c.name, *last), connection, of, metric)
    found: ByMetric = {}
    for run, phase, name, step, value in sorted(connection.execute(chosen), key=lambda row: by_phase(row[1])):
        if step is not None:
            found.setdefault(run, {})[phase, name] = math.nan if value is None else value
    return found


def best_of(connection: Connection, of: Collection[int] | None = None, metric: str | None = None) -> ByMetric:
    """Return the best finite value of each metric whose name tells which value is better.

    Metrics of single steps are left out: they do not measure a run.

    Args:
        of, metric: as of `last_values_of`.
    """
    value = valid_metrics.c.value
    least, most = func.min(value).filter(finite()), func.max(value).filter(finite())
    chosen = select(series.c.run, series.c.phase, series.c.name, least.label("min"), most.label("max"))
    chosen = chosen.join(valid_metrics, valid_metrics.c.series == series.c.id).group_by(series.c.id)
    chosen = chosen.where(series.c.phase.not_in(("step", "head")))
    rows = connection.execute(_chosen(chosen, connection, of, metric)).all()
    if rows and metric is not None and better_when(metric) is None:
        raise ConfigError(
            f"the name does not tell whether a smaller or a larger {metric!r} is better; "
            f"names that end in loss, acc or accuracy do: give {metric!r} for the last value"
        )
    found: ByMetric = {}
    for row in sorted(rows, key=lambda row: by_phase(row.phase)):
        better = better_when(row.name)
        if better is not None and row.min is not None:
            found.setdefault(row.run, {})[row.phase, row.name] = row.min if better == "min" else row.max
    return found


def _chosen(chosen: Any, connection: Connection, of: Collection[int] | None, metric: str | None) -> Any:
    if of is not None:
        chosen = chosen.where(one_of(connection, series.c.run, of))
    return chosen if metric is None else chosen.where(named_series(metric))


# ------------------------------------------------------------------------------ counts of starts


def counts(connection: Connection, of: Collection[int] | None = None) -> dict[int, dict[str, Any]]:
    """Return run -> {starts, kills, verified}, for all runs or some.

    `verified` is the worst that is known of the run's resumes: diverged, not verified, verified; without a
    resume that executed a step it is missing.
    """
    begun = select(*(segments.c[name] for name in ("run", "number", "status", "step", "facts")))
    begun = begun.add_columns(runs.c.status.label("now")).join(runs, runs.c.id == segments.c.run)
    begun = begun.where(segments.c.begun == 1, func.coalesce(segments.c.status, "") != "accepted")
    if of is not None:
        begun = begun.where(one_of(connection, segments.c.run, of))
    reported = badges_of(connection, of)
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
