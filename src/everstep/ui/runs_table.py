"""The runs of the page: kept up to date, told of by id, and what is said of their columns."""

from __future__ import annotations

import heapq
import json
import re
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from sqlalchemy import Connection, func, select

from everstep.contracts.metrics import better_when
from everstep.display.cells import finite, flat
from everstep.index.columns import BEST, RunColumns
from everstep.index.database import Database
from everstep.index.run_facts import COUNTS, FACTS, TEXTS
from everstep.index.run_queries import newest_facts, one_of
from everstep.index.sql_tables import runs, segments
from everstep.record.trust import MARKS
from everstep.views.progress import LOOKS

TIMES = ("created", "started", "heartbeat")
"""Facts that are seconds since 1970."""

MOST_SETTINGS = 3
"""Most settings among the columns of a list for which nobody chose any."""

MOST_ROWS = 1000
"""Most settings, metrics and facts in a comparison."""

MOST_CHOICES = 2000
"""Most names in a list of choices: a run may have recorded 100,000 settings."""

_PLAIN = re.compile(r"[\w+-][\w.+-]*")  # browsers and servers resolve "." and ".." in an address


class RunsTable(RunColumns):
    """Columns of all runs, which methods of several threads may ask for.

    Args:
        database: the index; each transaction has its own connection.
    """

    _of_records = ("paths", "differing")

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._ordered: list[dict[str, Any]] = []
        self._by_id: dict[str, dict[str, Any]] = {}
        self._told: dict[int, int] = {}
        """Run -> bytes of its journal of which somebody was told."""
        self._looks: dict[int, deque[tuple[float, int]]] = {}

    def update(
        self, connection: Connection, gone: Collection[int]
    ) -> tuple[list[str], list[tuple[str, int]]]:
        """Read what has changed in the index.

        Returns:
            The ids (`run_id`) of the runs that changed, and (id, step) of those whose journal grew.
        """
        before = self.rows
        changed, grown = self.refresh(connection, gone)
        with self._lock:
            self._ordered = sorted(self.rows.values(), key=lambda row: str(row["name"]))
            self._by_id = {run_id(row): row for row in self._ordered}
            running = {run: row["step"] for run, row in self.rows.items() if row["status"] == "running"}
            self._looks = {run: self._looks.get(run, deque(maxlen=LOOKS)) for run in running}
            for run, step in running.items():
                if not self._looks[run] or self._looks[run][-1][1] != step:
                    self._looks[run].append((time.monotonic(), step))
        ids = [run_id(self.rows.get(run) or before[run]) for run in changed]
        return ids, self._tell({run: (self.rows[run]["step"], size) for run, size in grown.items()})

    def grown(self, connection: Connection, of: Collection[str]) -> list[tuple[str, int]]:
        """Return (id, step) of those of some runs whose journal has grown; `update` reads their values later.

        Args:
            of: ids of runs.
        """
        asked = [run["id"] for run in self.chosen(of)]
        sized = select(runs.c.id, runs.c.step, func.sum(segments.c.size)).join(segments)
        found = connection.execute(sized.where(one_of(connection, runs.c.id, asked)).group_by(runs.c.id))
        return self._tell({run: (step, int(size)) for run, step, size in found})

    def _tell(self, found: Mapping[int, tuple[int, int]]) -> list[tuple[str, int]]:
        """Return (id, step) of the runs whose bytes nobody was told of, from run -> (step, bytes)."""
        new = {run: step for run, (step, size) in found.items() if self._told.get(run) != size}
        self._told |= {run: size for run, (_, size) in found.items()}
        return [(run_id(self.rows[run]), step) for run, step in new.items()]

    def looks(self, run: Mapping[str, Any]) -> list[tuple[float, int]]:
        """List when a running run was seen at new steps, and where it is now: (time, step).

        Without the last one a run that hangs would keep its pace.
        """
        with self._lock:
            seen = list(self._looks.get(run["id"], ()))
        return [*seen, (time.monotonic(), seen[-1][1])] if seen else []

    def runs(self) -> list[dict[str, Any]]:
        """List the rows of all runs, by name; a row is replaced and never changed."""
        return list(self._ordered)

    def run(self, given: str) -> dict[str, Any] | None:
        """Return the row of the run with an id; None if there is none."""
        return self._by_id.get(given)

    def chosen(self, given: Iterable[str]) -> list[dict[str, Any]]:
        """List the rows of the runs with these ids, in their order; unknown ids are left out."""
        return [self._by_id[one] for one in given if one in self._by_id]

    # -------------------------------------------------------------------------------- its columns

    def defaults(self) -> Iterator[str]:
        """Yield the columns that tell most: facts, the best value of a metric, settings that differ."""
        yield from ("name", "status")
        if self.values("verified"):
            yield "verified"
        yield from self._best_measured()[:1]
        yield from self.differing[:MOST_SETTINGS]
        yield from ("step", "epoch", "started")
        if any(value != "[]" for value in self.first("tags").values()):
            yield "tags"

    def _best_measured(self) -> list[str]:
        """List the columns of best values: evaluations before means of epochs, those of most runs first."""
        evaluated = {name for phase, name in self.metric_counts if phase not in ("head", "step", "epoch")}
        having: dict[str, int] = {}
        for (phase, name), count in self.metric_counts.items():
            if _is_measured(phase, name):
                having[name] = max(count, having.get(name, 0))
        ranked = sorted(having, key=lambda n: (n not in evaluated, -having[n], "loss" not in n, n))
        return [BEST + name for name in ranked]

    @cached_property
    def differing(self) -> list[str]:
        """The settings in which runs differ: those that most runs have, then those of most values.

        A seed comes last, and a text that differs between all runs, such as a path: neither is tuned.
        """
        columns: dict[str, list[Any]] = {}
        with self._reading() as connection:
            trees = newest_facts(connection, names=["config"])
        for tree in trees.values():
            for path, value in leaves(tree).items():
                columns.setdefault(path, []).append(value)
        ranks = {}
        for name, values in columns.items():
            distinct = {*values}
            if len(distinct) > 1:
                own = len(distinct) == len(values) > 2 and any(isinstance(value, str) for value in distinct)
                ranks[name] = (own or name.endswith("seed"), -len(values), -len(distinct), name)
        return sorted(ranks, key=ranks.__getitem__)[:MOST_CHOICES]

    def choices(self) -> list[str]:
        """List the names to choose from: of too many, those that most runs have; any may be typed."""
        metrics: dict[str, int] = {}
        for (phase, name), count in self.metric_counts.items():
            metrics |= {f"{phase}/{name}": count, name: max(count, metrics.get(name, 0))}
        having = dict(sorted(metrics.items())) | dict(sorted(self.paths.items()))
        for mark in MARKS:
            having.pop(mark, None)
        if len(having) > MOST_CHOICES:
            kept = {*heapq.nlargest(MOST_CHOICES, having, key=having.__getitem__)}
            having = {name: count for name, count in having.items() if name in kept}
        return list(dict.fromkeys([*FACTS, *COUNTS, *self._best_measured(), *having]))

    def side_by_side(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[Any]]]:
        """Return "settings", "metrics", "facts" -> name -> a value for each run, None where it has none.

        Metrics are "PHASE/NAME", and best/ before it where the name tells which value is best.
        """
        keys = [row["id"] for row in rows]
        with self._reading() as connection:
            recorded = {run: leaves(tree) for run, tree in newest_facts(connection, keys).items()}
        pairs = heapq.nlargest(MOST_ROWS, self.metric_counts, key=self.metric_counts.__getitem__)
        names = ["/".join(pair) for pair in sorted(pairs)]
        names += [f"{BEST}{'/'.join(pair)}" for pair in sorted(pairs) if _is_measured(*pair)]
        metrics = {name: self.first(name) for name in names}
        facts = {name: self.first(name) for name in (*FACTS, *COUNTS)}
        paths = dict.fromkeys(path for tree in recorded.values() for path in tree)
        found = {name: [recorded.get(key, {}).get(name) for key in keys] for name in sorted(paths)}
        return {
            "settings": {name: column for name, column in found.items() if name.startswith("config.")},
            "metrics": {name: [column.get(key) for key in keys] for name, column in metrics.items()},
            "facts": {name: [column.get(key) for key in keys] for name, column in facts.items()}
            | {name: column for name, column in found.items() if not name.startswith("config.")},
        }

    def meaning(self, name: str) -> str:
        """Return what a column tells: "last" or "best" of a metric, a "setting", or a "fact"."""
        source = self._sources.get(name) if self.values(name) else None
        if source in ("last", "best"):
            return source
        return "setting" if name.startswith("config.") else "fact"


def _is_measured(phase: str, name: str) -> bool:
    """Whether a metric has a best value."""
    return phase not in ("head", "step") and better_when(name) is not None


def run_id(run: Mapping[str, Any]) -> str:
    """Return the id of a run in an address: its name, or its key in the index where the name is odd."""
    name = str(run["name"])
    return name if _PLAIN.fullmatch(name) else f"~{run['id']}"


def leaves(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Map each path in a tree to its value; a list of plain values is a value, as JSON."""
    found: dict[str, Any] = {}
    for path, value in flat(tree):
        if path in MARKS:
            continue  # it tells nobody anything
        if not isinstance(value, list):
            found[path] = value
        elif not any(isinstance(item, dict | list) for item in value):
            found[path] = json.dumps(value)
    return found


def kind_of(name: str, values: Collection[Any]) -> str:
    """Return what a column holds: "status", "time", "number" or "text"."""
    if name == "status" or name in TIMES:
        return "status" if name == "status" else "time"
    if name in FACTS:
        return "text" if name in TEXTS else "number"
    there = [value for value in values if value is not None]
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in there)
    return "number" if there and numbers else "text"


shown = finite
"""Makes a value one of JSON: NaN and infinities are "NaN", "Infinity", "-Infinity"."""
