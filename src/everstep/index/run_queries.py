"""Queries to the index in SQL: for runs, their columns, and the rows of a run."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Connection, Select, func, select, tuple_

from everstep.contracts.metrics import better_when, phases_and_names
from everstep.display.cells import flat
from everstep.errors import ConfigError, nearest
from everstep.index import FACTS, GONE, STATUSES
from everstep.index.filters import Node, leaves, matcher, values_at
from everstep.index.sql_tables import events, facts, metrics, runs, segments, series, stored, valid_metrics
from everstep.labels import NAMES as LABELS
from everstep.labels import clean

if TYPE_CHECKING:
    from everstep.index.database import Database
    from everstep.record import Rollback  # it brings NumPy, which a list of runs does not need

_MOST_KEYS = 10_000
_PHASES = {"tail": 0, "epoch": 1, "step": 3, "head": 4}
"""Rank of phases (evaluations: 2): a metric's bare name means its phase of lowest rank."""


def by_phase(phase: str) -> tuple[int, str]:
    """Return a key that sorts phases, that of lowest rank first."""
    return _PHASES.get(phase, 2), phase


def run_rows(connection: Connection) -> dict[int, dict[str, Any]]:
    """Map the key of each run to its row in the table `runs`, the newest start last."""
    rows = connection.execute(select(runs).order_by(runs.c.started.nulls_first(), runs.c.name))
    return {row["id"]: dict(row) for row in rows.mappings()}


def names_of(name: str) -> list[str]:
    """Return the names that mean a run: with and without the six digits at its end."""
    return list(dict.fromkeys((name, re.sub("-[0-9a-f]{6}$", "", name))))


def find_run(
    connection: Connection, text: str, *, exactly: bool = False, place: str = "that was read"
) -> dict[str, Any]:
    """Find a run by its name, that of its directory, or a beginning; a run that is gone comes last."""
    rows = list(run_rows(connection).values())
    exact = [run for run in rows if text in (run["name"], run["path"])]
    by_name = [run for run in rows if text in (*names_of(run["name"]), Path(run["path"]).name)]
    begins = [run for run in rows if run["name"].startswith(text) and not exactly]
    for candidates in (exact, by_name, begins):
        present = [run for run in candidates if run["status"] != GONE] or candidates
        if len(present) == 1:
            return present[0]
        if present:
            names = ", ".join(sorted(run["name"] for run in present))
            raise ConfigError(f"{text!r} could mean several runs; give one of: {names}")
    raise ConfigError(
        f"there is no run {text!r} in the index {place}, and no run directory at that path; give the "
        f"directory of a run, or name another index; {nearest(text, (run['name'] for run in rows))}"
    )


def _in_runs(query: Select[Any], column: ColumnElement[Any], keys: Collection[int] | None) -> Select[Any]:
    """Restrict a query to some runs; more than a database takes as parameters are no restriction."""
    return query if keys is None or len(keys) > _MOST_KEYS else query.where(column.in_(keys))


def newest_facts(
    connection: Connection, keys: Collection[int] | None = None, names: Collection[str] = ()
) -> dict[int, dict[str, Any]]:
    """Return run -> facts of its newest start and its labels: of all runs or some, all facts or some."""
    query = _in_runs(select(facts.c.run, facts.c.name, facts.c.value), facts.c.run, keys)
    if names:
        query = query.where(facts.c.name.in_(names))
    by_run: dict[int, dict[str, Any]] = {}
    for run, name, text in connection.execute(query):
        by_run.setdefault(run, {})[name] = stored(text, object)
    return by_run


def watched(connection: Connection, keys: Collection[int] | None = None) -> dict[int, dict[str, str]]:
    """Return run -> metric -> "min" or "max", by the services of its newest start; that of a `Best` first."""
    by_run = {}
    for run, record in newest_facts(connection, keys, ["observers", "controllers"]).items():
        kinds = [record.get("observers"), record.get("controllers")]
        configs = [each for kind in kinds if isinstance(kind, dict) for each in kind.values()]
        judging = [each for each in configs if isinstance(each, dict) and each.get("mode") in ("min", "max")]
        by_run[run] = {str(each.get("metric")): str(each["mode"]) for each in judging}
    return by_run


def starts(connection: Connection, run: int) -> list[dict[str, Any]]:
    """List the starts of a run as JSON, the first start first.

    A start has columns of `segments`; `badge` is None if it did not train; and
        duration: the seconds from its begin to its end, or its last sign of life in the journal.
        from, from_step: the checkpoint from which it resumed, and the checkpoint's step; None, 0 without one.
        verified: how its resume was verified, in words; None for a start that resumed nothing.
        ranks, ranks_before: the number of its ranks, and that of the start before where it differs.
    """
    from everstep.record.journal_format import step_of

    names = ("number", "started", "last", "status", "reason", "step", "epoch")
    columns = segments.c[(*names, "badge", "diverged_at", "how", "again", "facts")]
    duration = (segments.c.last - func.nullif(segments.c.started, 0)).label("duration")
    entries = []
    rows = select(*columns, duration).where(segments.c.run == run).order_by(segments.c.number)
    for row in connection.execute(rows).mappings():
        start = dict(row)
        facts = stored(start.pop("facts"))
        start |= {"from": facts.get("resumed_from"), "from_step": step_of(facts.get("resumed_from"))}
        start |= {name: facts.get(name) for name in ("ranks", "ranks_before")}
        at = "" if row["diverged_at"] is None else f" at {row['diverged_at']}"
        start["verified"] = None if row["badge"] in (None, "first") else f"{row['badge']}{at}"
        entries.append(start)
    return entries


def rollbacks(connection: Connection, run: int) -> list[Rollback]:
    """List the rollbacks of a run since it last began from nothing, in order."""
    from everstep.record import Rollback

    origin = select(func.max(segments.c.number)).where(
        segments.c.run == run, segments.c.begun == 1, segments.c.parent.is_(None)
    )
    decisions = connection.execute(
        select(events.c.data, events.c.segment)
        .where(events.c.run == run, events.c.kind == "decision")
        .where(events.c.segment >= func.coalesce(origin.scalar_subquery(), 0))
        .order_by(events.c.segment, events.c.offset)
    )
    return Rollback.among((stored(row.data), row.segment) for row in decisions)


def _last(column: ColumnElement[Any]) -> Any:
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


_FINITE = valid_metrics.c.value.between(-1.7976931348623157e308, 1.7976931348623157e308)
"""Infinities are stored, NaN is NULL."""
_INSIDE = ("step", "head")
_MEASURES_A_RUN = series.c.phase.not_in(_INSIDE)
_EXTREMES = [extreme(valid_metrics.c.value).filter(_FINITE) for extreme in (func.min, func.max)]
_MEASURED = (
    select(series.c.id, series.c.run, series.c.phase, series.c.name, *_EXTREMES)
    .join(valid_metrics, valid_metrics.c.series == series.c.id)
    .group_by(series.c.id)
)


def _is_metric(name: str) -> ColumnElement[bool]:
    """Whether a row of `series` is of a metric, or of "PHASE/NAME"."""
    pairs = [(clean(phase), clean(bare)) for phase, bare in phases_and_names(name)]
    named = series.c.name == clean(name)
    return named | tuple_(series.c.phase, series.c.name).in_(pairs) if pairs else named


def last_values_of(
    connection: Connection, keys: Collection[int] | None = None, metric: str | None = None
) -> dict[int, dict[tuple[str, str], float]]:
    """Return run -> (phase, name) -> last value, of all metrics or one ("NAME" or "PHASE/NAME").

    The phase that a bare name means comes first.
    """
    last = _last(metrics.c.step).label("step"), _last(metrics.c.value).label("value")
    query = _in_runs(select(series.c.run, series.c.phase, series.c.name, *last), series.c.run, keys)
    if metric is not None:
        query = query.where(_is_metric(metric))
    by_run: dict[int, dict[tuple[str, str], float]] = {}
    for run, phase, name, step, value in sorted(connection.execute(query), key=lambda row: by_phase(row[1])):
        if step is not None:
            by_run.setdefault(run, {})[phase, name] = math.nan if value is None else value
    return by_run


def _better(directions: Mapping[int, Mapping[str, str]]) -> Callable[[int, str], str | None]:
    """Return the function (run, metric) -> "min" or "max".

    Services of the run say it (`directions`: see `watched`), or the metric's name, or services of other runs.
    """
    defaults = {name: mode for modes in directions.values() for name, mode in modes.items()}
    return lambda run, name: directions.get(run, {}).get(name) or better_when(name) or defaults.get(name)


def kept_best(
    connection: Connection, keys: Collection[int] | None = None
) -> dict[int, dict[str, tuple[float, int]]]:
    """Return run -> metric -> best value and its step, by each `Best` of the run's newest start."""
    services = newest_facts(connection, keys, ["observers"])
    valid = (segments.c.run == events.c.run) & (segments.c.number == events.c.segment)
    query = _in_runs(select(events.c.run, events.c.data).join(segments, valid), events.c.run, keys)
    query = query.where(events.c.kind == "best", events.c.offset < segments.c.valid_to)
    by_run: dict[int, dict[str, tuple[float, int]]] = {}
    for run, text in connection.execute(query.order_by(events.c.segment, events.c.offset)):
        best, observers = stored(text), services.get(run, {}).get("observers")
        if isinstance(observers, dict) and f"best {best['metric']}".replace("/", ".") in observers:
            by_run.setdefault(run, {})[clean(best["metric"])] = best["value"], best["step"]
    return by_run


def best_of(
    connection: Connection, metric: str, directions: Mapping[int, Mapping[str, str]]
) -> dict[int, float]:
    """Return run -> best finite value of a metric, or "PHASE/NAME"; `directions` are those of all runs.

    Where a run has a `Best` for the metric, its value counts.
    """
    rows = connection.execute(_MEASURED.where(_MEASURES_A_RUN, _is_metric(metric)))
    better_of, best = _better(directions), dict[int, float]()
    bests = {run: pair[0] for run, each in kept_best(connection).items() if (pair := each.get(clean(metric)))}
    # the phase that a bare name means comes last, and counts
    by_rank = sorted(rows, key=lambda row: by_phase(row.phase), reverse=True)
    for _, run, _, name, smallest, largest in by_rank:
        if run in bests:
            continue
        better = better_of(run, name)
        if better is None:
            raise ConfigError(
                f"nothing tells whether a smaller or a larger {name!r} is better: give {metric!r} for the "
                f'last value; one run with watch=({name!r}, "min") or "max" tells it of all runs, and so '
                "does a name that ends in loss, acc or accuracy"
            )
        if smallest is not None:
            best[run] = smallest if better == "min" else largest
    return best | bests


def summaries(connection: Connection, run: int, *, steps: bool = True) -> list[dict[str, Any]]:
    """Summarise the metrics of a run, those measured outside steps first, or these alone.

    `rows`, `step` and `last` are the number of valid values, and the step and value of the last; `smallest`
    and `largest` the finite extremes, or None.  `best` and `best_step` tell which of them is better, if
    services or the metric's name say it; metrics of single steps have none: they measure no run.  With a
    `Best` they are its value and step, in the phase that has the value, or else in "step".
    """
    m, entries = valid_metrics.c, []
    query = _MEASURED.add_columns(func.count(m.step), _last(metrics.c.step), _last(metrics.c.value))
    query = query.where(series.c.run == run, *[] if steps else [_MEASURES_A_RUN])
    results = connection.execute(query).all()
    better_of = _better(watched(connection, [run]))
    if not all(row.phase in _INSIDE or better_of(run, row.name) for row in results):
        better_of = _better(watched(connection))
    for key, _, phase, name, smallest, largest, rows, step, last in results:
        better = None if phase in _INSIDE else better_of(run, name)
        best = {"min": smallest, "max": largest}.get(str(better))
        first = select(m.step).where(m.series == key, m.value == best).order_by(m.segment, m.offset, m.row)
        best_step = None if best is None else connection.execute(first.limit(1)).scalar()
        one = {"phase": phase, "name": name, "rows": rows, "step": step}
        one |= {"last": math.nan if last is None else last}
        one |= {"smallest": smallest, "largest": largest, "best": best, "best_step": best_step}
        entries.append(one)
    entries.sort(key=lambda one: (by_phase(one["phase"]), one["name"]))
    for name, (value, step) in kept_best(connection, [run]).get(run, {}).items():
        peers = [one for one in entries if one["name"] == name]
        hits = [one for one in peers if value in (one["smallest"], one["largest"]) or one["phase"] == "step"]
        if not hits:  # `steps` leaves it out
            nothing = dict.fromkeys(("rows", "step", "last", "smallest", "largest"))
            entries += (hits := [{"phase": "step", "name": name, **nothing}])
        for one in peers:
            one["best"] = one["best_step"] = None
        hits[0]["best"], hits[0]["best_step"] = value, step
    return entries


def rows_of(
    connection: Connection, collection: str, fields: Sequence[str], where: Node
) -> Generator[dict[str, Any], None, None]:
    """Yield documents as they were written; the database leaves out those of other runs, phases and names."""
    from everstep.record.journal_format import step_of

    v, e = valid_metrics.c, events.c
    selective: dict[str, Any] = {"run": v.run, "phase": v.phase, "name": v.name}
    if collection == "checkpoints":
        query = select(runs.c.name.label("run"), e.segment, e.time, e.data).join(runs, runs.c.id == e.run)
        query = query.where(e.kind == "checkpoint").order_by(runs.c.name, e.segment, e.offset)
        selective = {"run": runs.c.name}
    else:
        query = select(*(v[name] for name in fields))
        query = query.order_by(v.run, v.phase, v.name, v.segment, v.offset, v.row)
    if collection == "evaluations":
        query = query.where(v.phase.not_in(("head", "step")))
    for leaf in leaves(where, required=True):
        if leaf.operator != "$in" or leaf.path not in selective:
            continue
        if all(isinstance(value, str) and value == clean(value) for value in leaf.value):
            query = query.where(selective[leaf.path].in_(leaf.value))
    with connection.execute(query, execution_options={"yield_per": 10_000}) as result:
        for row in map(dict, result.mappings()):
            if "value" in row:
                value = math.nan if row["value"] is None else row["value"]
                row |= {"wall": bool(row["wall"]), "value": value}
            else:
                saved = stored(row.pop("data"))
                name = saved.get("name")
                row |= {"name": name, "bytes": saved.get("bytes"), "step": step_of(name)}
            yield row


def metric_names(connection: Connection, run: int) -> list[tuple[str, str]]:
    """List (phase, name) of every metric of a run, those measured outside steps first."""
    pairs = connection.execute(select(series.c.phase, series.c.name).where(series.c.run == run))
    return sorted(((p, n) for p, n in pairs), key=lambda one: (by_phase(one[0]), one[1]))


BEST = "best/"
"""Beginning of the names of columns of best values: "best/valid_loss", "best/tail/valid_loss" for a phase."""

_MOST_READ = 100
"""Most runs whose records are read for a hint."""


class RunColumns:
    """Columns of all runs, read when first needed; `rows`: key -> row in `runs`, the newest start last."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._columns: dict[str, dict[int, list[Any]]] = {}
        self._records: dict[str, dict[int, dict[str, Any]]] = {}
        with database.read() as connection:
            self.rows = run_rows(connection)

    def find(self, where: Node, names: Iterable[str] = ()) -> list[dict[str, Any]]:
        """Return the rows of the runs for which a filter holds; a name that no run has is an error.

        `names`: further names, to sort by or to show.
        """
        conditions = list(leaves(where))
        # "$exists" and null may hold of a run without a value
        demands = [one for one in conditions if one.operator != "$exists"]
        paths = [one.path for one in demands if one.operator != "$in" or None not in one.value]
        for name in dict.fromkeys([*paths, *names]):
            self._require(name)
        for leaf in conditions:
            if leaf.path == "status" and leaf.operator == "$in":
                for status in set(map(str, leaf.value)) - {*STATUSES, "None"}:
                    raise ConfigError(f"there is no status {status!r}; {nearest(status, STATUSES)}")
        holds = matcher(where)
        return [
            row
            for run, row in self.rows.items()
            if holds(lambda path, run=run: self.values(path).get(run, ()))  # type: ignore[misc]
        ]

    def values(self, name: str) -> Mapping[int, list[Any]]:
        """Return run -> values of a name, of those runs that have any: a metric hides no setting."""
        if name not in self._columns and name in FACTS:
            self._columns[name] = {
                run: names_of(row["name"]) if name == "name" else [row[name]]
                for run, row in self.rows.items()
            }
        if name not in self._columns:
            top = name.partition(".")[0]
            with self.database.read() as connection:
                if top not in self._records:
                    self._records[top] = newest_facts(connection, names=[top])
                last = last_values_of(connection, metric=name)
                metrics = {run: next(iter(values.values())) for run, values in last.items()}
                if name.startswith(BEST):
                    metrics = metrics or best_of(connection, name.removeprefix(BEST), self.watched)
            settings = {run: values_at(tree, name) for run, tree in self._records[top].items()}
            column = {run: [value] for run, value in metrics.items()}
            column |= {run: values for run, values in settings.items() if values}
            self._columns[name] = column  # at once: other threads of the page read it
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

    def _require(self, name: str) -> None:
        if not self.rows or name in (*FACTS, *LABELS) or self.values(name):
            return
        above = self.values(name.rpartition(".")[0])
        if above and all(value is None for values in above.values() for value in values):
            return  # as `git.commit` of runs outside a repository
        with self.database.read() as connection:
            newest = newest_facts(connection, list(self.rows)[-_MOST_READ:])
            tops = connection.execute(select(facts.c.name).distinct()).scalars().all()
        paths = {*tops, *(path for tree in newest.values() for path in _paths_in(tree))}
        ends = [path for path in paths if path.endswith(f".{name}")]  # a setting, named by its last word
        match = min(ends, key=lambda path: (not path.startswith("config."), len(path), path), default=None)
        metric = name.removeprefix(BEST)
        if metric != name and metric in self._metrics:
            raise ConfigError(
                f"no run has {name!r}: {metric!r} was measured inside steps alone; give {metric!r} for the "
                f'last value; runs with watch=({metric!r}, "min") or "max" have a best one'
            )
        best = {f"{BEST}{metric}" for metric in self._metrics} if name.startswith(BEST) else ()
        names = {*FACTS, *self._metrics, *paths, *best}
        hint = f"did you mean {match!r}?" if match else nearest(name, names, most=10)
        raise ConfigError(f"no run has {name!r}; {hint}")

    @cached_property
    def _metrics(self) -> Counter[str]:
        """Name of each metric -> number of its series in all runs."""
        with self.database.read() as connection:
            rows = connection.execute(select(series.c.name, func.count()).group_by(series.c.name))
            return Counter({name: count for name, count in rows})

    @cached_property
    def watched(self) -> dict[int, dict[str, str]]:
        with self.database.read() as connection:
            return watched(connection)

    @cached_property
    def _machine_metrics(self) -> set[str]:
        """Names of metrics of the clock and the machine, as their newest series in all runs says."""
        newest = select(series.c.name, func.max(series.c.id).label("id")).group_by(series.c.name).subquery()
        wall = select(metrics.c.wall).where(metrics.c.series == newest.c.id).limit(1).scalar_subquery()
        with self.database.read() as connection:
            return set(connection.execute(select(newest.c.name).where(wall == 1)).scalars())

    def telling_metric(self) -> str | None:
        """Return the metric that tells most: that which most runs watch, or else one of validation.

        None of the clock and the machine (`Throughput`, `System`).
        """
        # by the name, too: imports do not say what is of the clock
        names = [n for n in self._metrics if n not in self._machine_metrics and not n.endswith("time")]
        votes = Counter(metric for metrics in self.watched.values() for metric in [*metrics][:1])

        def key(name: str) -> tuple[int, bool, int, bool]:
            return votes[name], name.startswith(("val", "eval", "test")), self._metrics[name], "loss" in name

        return max(names, key=key, default=None)


def _paths_in(tree: Mapping[str, Any]) -> Iterable[str]:
    for path, value in flat(tree):
        yield path
        for item in value if isinstance(value, list) else ():
            if isinstance(item, dict):
                yield from (f"{path}.{below}" for below in _paths_in(item))
