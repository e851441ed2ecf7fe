"""Columns of runs: a fact, a recorded value, the last or best value of a metric."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select

from everstep.contracts.metrics import better_when
from everstep.display.cells import flat
from everstep.errors import ConfigError, nearest
from everstep.index import FACTS, STATUSES
from everstep.index.filters import Node, leaves, matcher, values_at
from everstep.index.run_queries import best_of, last_values_of, names_of, newest_facts, run_rows, watched
from everstep.index.sql_tables import facts, metrics, series
from everstep.labels import NAMES as LABELS

if TYPE_CHECKING:
    from everstep.index.database import Database

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
        paths = [leaf.path for leaf in conditions if not leaf.about_missing]
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
                    metrics = metrics or best_of(connection, name.removeprefix(BEST), self._watched)
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
    def _watched(self) -> dict[int, dict[str, str]]:
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
        votes = Counter(metric for metrics in self._watched.values() for metric in [*metrics][:1])

        def key(name: str) -> tuple[int, bool, int, bool]:
            return votes[name], name.startswith(("val", "eval", "test")), self._metrics[name], "loss" in name

        return max(names, key=key, default=None)

    def has_direction(self, metric: str) -> bool:
        """Whether it is known which value of a metric is better."""
        is_watched = any(metric in metrics for metrics in self._watched.values())
        return is_watched or better_when(metric) is not None


def _paths_in(tree: Mapping[str, Any]) -> Iterable[str]:
    for path, value in flat(tree):
        yield path
        for item in value if isinstance(value, list) else ():
            if isinstance(item, dict):
                yield from (f"{path}.{below}" for below in _paths_in(item))
