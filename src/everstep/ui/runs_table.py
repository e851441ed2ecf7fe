"""All runs of an index in memory, as columns: 10,000 runs are filtered and sorted without a query."""

from __future__ import annotations

import heapq
import json
import re
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

from sqlalchemy import Connection, func, select

from everstep.display.cells import finite, flat
from everstep.index.columns import BEST, best_of, counts, is_recorded, last_values_of, taken_for_metric
from everstep.index.run_facts import FACTS, TEXTS
from everstep.index.run_queries import newest_facts, one_of, run_rows
from everstep.index.sql_tables import runs, segments
from everstep.labels import NAMES as LABELS
from everstep.record.trust import MARKS
from everstep.views.progress import LOOKS

TIMES = ("created", "started", "heartbeat")
"""Facts that are seconds since 1970."""

MOST_SETTINGS = 3
"""Most settings among the columns of a list for which nobody chose any."""

LONGEST_LIST = 1000
"""Most elements of a list in a column."""

MOST_CHOICES = 2000
"""Most names in a list of choices: a run may have recorded 100,000 settings."""

_PLAIN = re.compile(r"[\w+-][\w.+-]*")  # browsers and servers resolve "." and ".." in an address


class RunsTable:
    """Facts of each run, the record of its newest start, and the last value of each of its metrics.

    Methods may be called from several threads.

    Attributes:
        version: number of updates that changed something.
    """

    def __init__(self) -> None:
        self.version = 0
        self._lock = threading.RLock()
        self._runs: dict[int, dict[str, Any]] = {}
        self._sizes: dict[int, int] = {}
        self._labels: dict[int, dict[str, Any]] = {}
        self._recorded: dict[str, dict[int, Any]] = {}
        """Path into the record -> run -> value; a list is a `Several`."""
        self._metrics: dict[str, dict[int, float]] = {}
        self._best: dict[str, dict[int, float]] = {}
        """ "best/NAME" and "best/PHASE/NAME" -> run -> value."""
        self._counts: dict[str, dict[int, Any]] = {}
        self._pairs: dict[str, tuple[str, str]] = {}
        self._facts: dict[str, dict[int, Any]] = {}
        self._kinds: dict[str, str] = {}
        self._defaults: tuple[str, ...] | None = None
        self._differing: list[str] = []
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
        rows = run_rows(connection, gone)
        sized = select(segments.c.run, func.sum(segments.c.size)).group_by(segments.c.run)
        sizes = {run: int(size) for run, size in connection.execute(sized)}
        before, sizes_before = self._runs, self._sizes
        changed = [run for run, row in rows.items() if before.get(run) != row]
        grown = [run for run in rows if sizes.get(run) != sizes_before.get(run)]
        begun = [run for run in changed if before.get(run, {}).get("started") != rows[run]["started"]]
        labels = newest_facts(connection, names=LABELS)
        labelled = [run for run in rows if labels.get(run) != self._labels.get(run)]
        changed, begun = (list(dict.fromkeys([*some, *labelled])) for some in (changed, begun))
        lost = before.keys() - rows.keys()
        values = last_values_of(connection, grown)
        best = best_of(connection, grown)
        counted = counts(connection, [*changed, *grown])
        facts = newest_facts(connection, begun)
        pairs = {f"{phase}/{name}": (phase, name) for found in values.values() for phase, name in found}
        with self._lock:
            self._runs, self._sizes, self._labels = rows, sizes, labels
            self._note_steps()
            self._pairs = {**self._pairs, **pairs}
            _replace(self._recorded, [*begun, *lost], {run: leaves(found) for run, found in facts.items()})
            _replace(self._metrics, [*grown, *lost], {run: _named(found) for run, found in values.items()})
            _replace(self._best, [*grown, *lost], {run: _best(found) for run, found in best.items()})
            _replace(self._counts, [*changed, *grown, *lost], counted)
            if changed or grown or lost:
                self.version += 1
                self._ordered = sorted(rows.values(), key=lambda row: str(row["name"]))
                self._by_id = {run_id(row): row for row in self._ordered}
                self._facts = {name: {run: row[name] for run, row in rows.items()} for name in FACTS}
                self._kinds.clear()
                self._defaults = None
        ids = [run_id(before[run]) for run in lost]
        ids += [run_id(rows[run]) for run in dict.fromkeys([*changed, *grown])]
        return ids, self._tell({run: (rows[run]["step"], sizes.get(run, 0)) for run in grown})

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
        return [(run_id(self._runs[run]), step) for run, step in new.items()]

    def _note_steps(self) -> None:
        running = {run: row["step"] for run, row in self._runs.items() if row["status"] == "running"}
        self._looks = {run: self._looks.get(run, deque(maxlen=LOOKS)) for run in running}
        for run, step in running.items():
            if not self._looks[run] or self._looks[run][-1][1] != step:
                self._looks[run].append((time.monotonic(), step))

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

    def names(self) -> list[str]:
        """List every name that a column may have: facts, metrics, and paths into the record."""
        with self._lock:
            best = sorted(name for name in self._best if name.removeprefix(BEST) not in self._pairs)
            found = [*FACTS, *self._counts, *best, *sorted(self._metrics), *sorted(self._recorded)]
        return list(dict.fromkeys(found))

    def defaults(self) -> tuple[str, ...]:
        """List the columns that tell most: facts, the best value of a metric, settings that differ."""
        with self._lock:
            if self._defaults is None:
                self._differing = self._ranked()
                self._defaults = tuple(self._telling())
            return self._defaults

    def _telling(self) -> Iterator[str]:
        yield from ("name", "status")
        yield from (name for name in ("verified",) if name in self._counts)
        yield from self._best_measured()[:1]
        yield from self._differing[:MOST_SETTINGS]
        yield from ("step", "epoch", "started")
        if any(value != "[]" for value in map(_first, self._recorded.get("tags", {}).values())):
            yield "tags"

    def _best_measured(self) -> list[str]:
        """List the columns of best values: evaluations before means of epochs, those of most runs first."""
        evaluated = {name for phase, name in self._pairs.values() if phase not in ("head", "step", "epoch")}
        known = [name.removeprefix(BEST) for name in self._best if name.removeprefix(BEST) not in self._pairs]
        known.sort(key=lambda n: (n not in evaluated, -len(self._best[BEST + n]), "loss" not in n, n))
        return [BEST + name for name in known]

    def differing(self) -> list[str]:
        """List the settings in which runs differ: most telling first, at most `MOST_CHOICES`."""
        with self._lock:
            self.defaults()
            return self._differing[:MOST_CHOICES]

    def _ranked(self) -> list[str]:
        """List the settings in which runs differ: those that most runs have, then those of most values.

        A seed comes last, and a text that differs between all runs, such as a path: neither is tuned.
        """
        ranks = {}
        for name, values in self._recorded.items():
            distinct = set(map(_first, values.values())) if name.startswith("config.") else set()
            if len(distinct) < 2:
                continue
            own = len(distinct) == len(values) > 2 and any(isinstance(value, str) for value in distinct)
            ranks[name] = (own or name.endswith("seed"), -len(values), -len(distinct), name)
        return sorted(ranks, key=ranks.__getitem__)

    def choices(self) -> list[str]:
        """List the names to choose from: of too many, those that most runs have; any may be typed."""
        found = self.names()
        if len(found) <= MOST_CHOICES:
            return found
        kept = set(heapq.nlargest(MOST_CHOICES, found, key=lambda name: len(self.column(name) or ())))
        return [name for name in found if name in kept]

    def noted(self, name: str) -> str | None:
        """Say how the setting is written that has the name of a metric; None if there is none."""
        with self._lock:
            if "/" in name or name in FACTS or name not in self._metrics:
                return None
            ends = [one for one in self._recorded if one.startswith("config.") and one.endswith(f".{name}")]
        return taken_for_metric(name, min(ends, key=lambda one: (len(one), one))) if ends else None

    def meaning(self, name: str) -> str:
        """Return what a column tells: "last" or "best" of a metric, a "setting", or a "fact"."""
        with self._lock:
            if self._is_own(name):
                return "setting" if name.startswith("config.") else "fact"
            if name in self._metrics:
                return "last"
            if name in self._best:
                return "best"
        return "setting" if name.startswith("config.") else "fact"

    def group(self, name: str) -> Literal["settings", "metrics", "facts"]:
        """Return what a name is."""
        if name in FACTS:
            return "facts"
        with self._lock:
            is_metric = (name in self._metrics or name in self._best) and not self._is_own(name)
        return "metrics" if is_metric else "settings" if name.startswith("config.") else "facts"

    def pairs(self) -> Mapping[str, tuple[str, str]]:
        """Return "PHASE/NAME" -> (phase, name) of metrics; both may have a "/" in them."""
        return self._pairs

    def column(self, name: str) -> Mapping[int, Any] | None:
        """Return run -> value of a name, a `Several` for a list; None for a name that is not in `names`.

        A column is replaced and never changed.
        """
        with self._lock:
            if self._is_own(name):
                return self._recorded[name]
            for columns in (self._facts, self._metrics, self._counts, self._best, self._recorded):
                if name in columns:
                    return columns[name]
            return None

    def _is_own(self, name: str) -> bool:
        """Whether some run has recorded a name that is everstep's: no metric hides it."""
        return name not in FACTS and is_recorded(name) and name in self._recorded

    def kind(self, name: str) -> str:
        """Return what a column holds: "status", "time", "number" or "text"."""
        with self._lock:
            found = self._kinds.get(name)
            if found is None:
                found = self._kinds[name] = kind_of(name, (self.column(name) or {}).values())
            return found


def run_id(run: Mapping[str, Any]) -> str:
    """Return the id of a run in an address: its name, or its key in the index where the name is odd."""
    name = str(run["name"])
    return name if _PLAIN.fullmatch(name) else f"~{run['id']}"


class Several(tuple[Any, ...]):
    """List in a record: its JSON first, then its elements, as queries find them."""


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, Several) else value


def _named(values: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """Name the values of metrics: as "PHASE/NAME", and by the name alone in the first phase that has it."""
    found = {f"{phase}/{name}": value for (phase, name), value in values.items()}
    for (_, name), value in values.items():
        found.setdefault(name, value)
    return found


def _best(values: Mapping[tuple[str, str], float]) -> dict[str, float]:
    return {f"{BEST}{name}": value for name, value in _named(values).items()}


def _replace(
    columns: dict[str, dict[int, Any]], dropped: Iterable[int], new: dict[int, dict[str, Any]]
) -> None:
    """Take some runs out of all columns, and enter their new values."""
    old = set(dropped)
    touched = {name for name in columns if old and not columns[name].keys().isdisjoint(old)}
    touched.update(name for values in new.values() for name in values)
    for name in touched:  # copied: requests may be reading the column
        columns[name] = {run: value for run, value in columns.get(name, {}).items() if run not in old}
    for run, values in new.items():
        for name, value in values.items():
            columns[name][run] = value
    for name in touched:
        if not columns[name]:
            del columns[name]


def leaves(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Map each path in a tree to its value; a list of plain values is a value."""
    found: dict[str, Any] = {}
    for path, value in flat(tree):
        if path in MARKS:
            continue  # it tells nobody anything
        if not isinstance(value, list):
            found[path] = value
        elif not any(isinstance(item, dict | list) for item in value):
            found[path] = Several([json.dumps(value), *value[:LONGEST_LIST]])
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


def shown(value: Any) -> Any:
    """Return a value for JSON: of several the first, NaN and infinities as "NaN", "Infinity", "-Infinity"."""
    if isinstance(value, Several):
        value = value[0]
    return finite(value)
