"""The runs of the page: their ids, the list that a filter selects, runs side by side; all as JSON."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from everstep.contracts.metrics import better_when
from everstep.display.cells import TIMES, flat, json_safe
from everstep.index.filters import leaves, ordered, parse_json, parse_words
from everstep.index.run_queries import BEST, RunColumns, metric_names, newest_facts
from everstep.record.trust import MARK

_MOST_SETTINGS, _MOST_COMPARED = 3, 200
"""Most settings among the columns of a list for which nobody chose any, and in a comparison."""

_MOST_LOOKED_AT = 1000
"""Most runs of a list whose own settings decide on its columns; else those of all runs do."""

_PLAIN = re.compile(r"[\w+-][\w.+-]*")  # browsers and servers resolve "." and ".." in an address


class ListOptions(NamedTuple):
    """Options of a list: a filter (comparisons, or JSON in MongoDB's language), order, columns, page."""

    filter: str = ""
    sort: str = "started"
    descending: bool = True
    columns: Sequence[str] = ()
    offset: int = 0
    limit: int = 100


class RunsTable(RunColumns):
    """Columns of all runs, as the index was when this was made."""

    @cached_property
    def _by_id(self) -> dict[str, dict[str, Any]]:
        return {run_id(row): row for row in self.rows.values()}

    def chosen(self, ids: Iterable[str]) -> list[dict[str, Any]]:
        """List the rows of the runs with these ids, in their order; unknown ids are left out."""
        return [self._by_id[one] for one in ids if one in self._by_id]

    def listed(self, options: ListOptions) -> dict[str, Any]:
        """Return the runs that somebody asks for."""
        is_json = options.filter.lstrip().startswith("{")
        condition = (parse_json if is_json else parse_words)(options.filter)
        names = [*([] if is_json else (leaf.path for leaf in leaves(condition))), options.sort]
        rows = self.find(condition, [options.sort, *options.columns])
        headers = list(dict.fromkeys(options.columns or [*self._defaults(rows), *names]))
        columns = {name: self.first(name) for name in {options.sort, *headers}}
        by_name = sorted(rows, key=lambda run: str(run["name"]))  # ties stay in this order
        values = [{"run": run, "value": columns[options.sort].get(run["id"])} for run in by_name]
        runs: list[Any] = [one["run"] for one in ordered(values, "value", options.descending)]
        return {
            "total": len(self.rows),
            "matched": len(runs),
            "columns": [{"name": name, "kind": kind_of(name, columns[name].values())} for name in headers],
            "rows": [
                heading(run)
                | {"values": {name: _cell(name, columns[name].get(run["id"])) for name in headers}}
                for run in runs[options.offset : options.offset + options.limit]
            ],
        }

    def _defaults(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Yield the columns that tell most: facts, the best value of a metric, settings that differ."""
        yield from ("name", "status")
        if any(row["verified"] for row in self.rows.values()):
            yield "verified"
        yield from self._results()
        settings = self._differing(rows) if len(rows) <= _MOST_LOOKED_AT else self._differing_in_all
        yield from settings[:_MOST_SETTINGS]
        yield from ("step", "epoch", "started")
        if any(value != "[]" for value in self.first("tags").values()):
            yield "tags"

    def _results(self) -> list[str]:
        """Name the column that tells best how a run went, if there is one."""
        metric = self.telling_metric()
        if metric is None:
            return []
        has_direction = better_when(metric) or any(metric in modes for modes in self.watched.values())
        has_best = has_direction and self.values(BEST + metric)  # none of metrics of steps
        return [BEST + metric if has_best else metric]

    @cached_property
    def _settings(self) -> dict[int, dict[str, Any]]:
        with self.database.read() as connection:
            trees = newest_facts(connection, names=["config"])
        return {run: plain(tree) for run, tree in trees.items()}

    @cached_property
    def _differing_in_all(self) -> list[str]:
        return self._differing(self.rows.values())

    def _differing(self, rows: Iterable[Mapping[str, Any]]) -> list[str]:
        """Settings that differ: those that most runs have first, seeds and texts such as paths last."""
        columns: dict[str, list[Any]] = {}
        for row in rows:
            for path, value in self._settings.get(row["id"], {}).items():
                columns.setdefault(path, []).append(value)
        ranks = {}
        for name, values in columns.items():
            distinct = {*values}
            if len(distinct) > 1:
                is_unique = len(distinct) == len(values) > 2 and any(isinstance(v, str) for v in distinct)
                ranks[name] = (is_unique or name.endswith("seed"), -len(values), -len(distinct), name)
        return sorted(ranks, key=ranks.__getitem__)

    def compared(self, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return some runs side by side: the settings in which they differ, and which metrics they have."""
        with self.database.read() as connection:
            trees = newest_facts(connection, [run["id"] for run in runs], names=["config"])
            streams = {pair for run in runs for pair in metric_names(connection, run["id"])}
        settings = [plain(trees.get(run["id"], {})) for run in runs]
        results = [(name, self.first(name)) for name in self._results()]
        return {
            "runs": [heading(run) | {"path": str(run["path"])} for run in runs],
            "results": [
                {"name": name, "values": [json_safe(column.get(run["id"])) for run in runs]}
                for name, column in results
            ],
            "settings": differing(settings)[:_MOST_COMPARED],
            "streams": streams_of(streams),
        }


def differing(trees: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return {name, values} of each name whose values differ; None where one of the trees lacks it."""
    names = dict.fromkeys(name for tree in trees for name in tree)
    rows = [{"name": name, "values": [json_safe(tree.get(name)) for tree in trees]} for name in sorted(names)]
    return [row for row in rows if len({repr(value) for value in row["values"]}) > 1]


def streams_of(pairs: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return the metrics of each phase."""
    streams: dict[str, list[str]] = {}
    for phase, name in sorted(pairs):
        streams.setdefault(phase, []).append(name)
    return [{"stream": phase, "metrics": names} for phase, names in streams.items()]


def _cell(name: str, value: Any) -> Any:
    return ", ".join(json.loads(value)) if name == "tags" and value else json_safe(value)


def heading(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what stands of a run in every list."""
    beat = run["heartbeat"]
    return {
        "id": run_id(run),
        **{name: run[name] for name in ("name", "status", "diverged", "created", "step", "duration")},
        "heartbeat": None if beat is None else max(0.0, time.time() - beat),
    }


def run_id(run: Mapping[str, Any]) -> str:
    """Return the id of a run in an address: its name, or its key in the index where the name is odd."""
    name = str(run["name"])
    return name if _PLAIN.fullmatch(name) else f"~{run['id']}"


def plain(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Map each path in a tree, but marks that tell nobody anything, to its value; a list is one, as text."""
    return {path: str(v) if isinstance(v, list) else v for path, v in flat(tree) if path != MARK}


def kind_of(name: str, values: Collection[Any]) -> str:
    """Return what a column holds: "status", "duration", "time", "number" or "text"."""
    if name in ("status", "duration") or name in TIMES:
        return "time" if name in TIMES else name
    present = [value for value in values if value is not None]
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in present)
    return "number" if present and numbers else "text"
