"""The list of runs, filtered by the words of `everstep runs`, sorted, in pages; and runs side by side."""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from everstep.contracts.metrics import better_when
from everstep.index.columns import BEST
from everstep.index.filters import Group, leaves, ordered, parse_json, parse_words, paths, why_none
from everstep.index.run_facts import GONE
from everstep.ui.runs_table import MOST_ROWS, RunsTable, kind_of, run_id, shown
from everstep.views.compare_runs import NOT_COMPARED

MOST = 10_000
"""Most runs in an answer."""


class Asked(NamedTuple):
    """Question for a list: a filter (comparisons, or JSON in MongoDB's language), order, columns, page.

    `grouped`: the runs of a sweep stand together.
    """

    filter: str = ""
    sort: str = "started"
    descending: bool = True
    grouped: bool = False
    columns: Sequence[str] = ()
    offset: int = 0
    limit: int = 100


def list_runs(table: RunsTable, asked: Asked) -> dict[str, Any]:
    """Return the runs that a question means, as JSON."""
    where = _parsed(asked.filter)
    named = [*([] if _is_json(asked.filter) else paths(where)), asked.sort]
    wanted = list(dict.fromkeys(asked.columns or [*table.defaults(), *named]))
    table.require(leaves(where), [asked.sort, *asked.columns])
    columns = {name: table.first(name) for name in {asked.sort, *wanted}}
    found: list[dict[str, Any]] = [
        {"run": run, "value": columns[asked.sort].get(run["id"])} for run in _matched(table, where)
    ]
    # Stable: ties stay in the order of names.
    runs = [one["run"] for one in ordered(found, "value", asked.descending)]
    now, sweeps = time.time(), _sweeps(table)
    if asked.grouped:
        runs = _grouped(runs, sweeps)
    return {
        "total": len(table.rows),
        "matched": len(runs),
        "columns": [
            {"name": name, "kind": kind_of(name, columns[name].values()), "of": table.meaning(name)}
            for name in wanted
        ],
        "notes": table.taken_for_metrics(named),
        "why_none": "" if runs or _is_json(asked.filter) else why_none(where),
        "choices": table.choices(),
        "differing": table.differing,
        "rows": [
            _row(run, {name: columns[name].get(run["id"]) for name in wanted}, sweeps.get(run["id"]), now)
            for run in runs[asked.offset : asked.offset + asked.limit]
        ],
    }


def _row(run: Mapping[str, Any], values: Mapping[str, Any], sweep: Any, now: float) -> dict[str, Any]:
    beat = run["heartbeat"]
    return {
        "id": run_id(run),
        **{name: run[name] for name in ("name", "status", "diverged")},
        "heartbeat": None if beat is None else max(0.0, now - beat),
        "sweep": sweep,
        "values": {name: shown(value) for name, value in values.items() if value is not None},
    }


def _parsed(text: str) -> Group:
    """Read a filter: comparisons, or JSON."""
    return Group(True, (parse_json(text),)) if _is_json(text) else parse_words(text)


def _is_json(text: str) -> bool:
    return text.lstrip().startswith("{")


def _matched(table: RunsTable, where: Group) -> list[dict[str, Any]]:
    """Select the runs that meet a filter, by name."""
    return sorted(table.find(where), key=lambda run: str(run["name"]))


def _sweeps(table: RunsTable) -> Mapping[int, Any]:
    """Map runs to their sweeps, without each run in whose directory its trial was trained again."""
    sweeps = table.first("sweep")
    there = {run["path"] for run in table.rows.values() if run["status"] != GONE}
    gone = (run for run in table.rows.values() if run["status"] == GONE and run["path"] in there)
    replaced = {run["id"] for run in gone}
    return {run: sweep for run, sweep in sweeps.items() if run not in replaced}


def _grouped(found: list[dict[str, Any]], sweeps: Mapping[int, Any]) -> list[dict[str, Any]]:
    """Move the runs of each sweep to the first of them; runs of no sweep come last."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for run in found:
        groups.setdefault(sweeps.get(run["id"]), []).append(run)
    alone = groups.pop(None, [])
    return [run for group in (*groups.values(), alone) for run in group]


# --------------------------------------------------------------------------------- side by side


def numeric_columns(table: RunsTable, text: str) -> dict[str, Any]:
    """Return the columns that have a number for some of the runs that a filter selects, as JSON.

    Returns:
        settings, metrics, facts: lists of {name, varied}, which says whether two of the numbers differ.
    """
    where = _parsed(text)
    table.require(leaves(where))
    told: dict[str, list[dict[str, Any]]] = {}
    for group, columns in table.side_by_side(_matched(table, where)).items():
        told[group] = []
        for name, column in columns.items():
            values = {value for value in column if value is not None}
            if values and kind_of(name, values) == "number":
                told[group].append({"name": name, "varied": len(values) > 1})
    return told


def side_by_side(table: RunsTable, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is known of some runs, a row for each name: as `everstep compare` tells it, without files.

    Returns:
        settings, metrics and facts: each a list of a name and its values, one per run; null where a run
            lacks it.  Metrics are last values, with the best where the name tells what is better.
        streams: which metrics the runs have, all together.
    """
    found = table.side_by_side(runs)
    rows: dict[str, list[dict[str, Any]]] = {}
    for group, columns in found.items():
        rows[group] = [
            {"name": name, "values": list(map(shown, values))}
            for name, values in columns.items()
            if name not in NOT_COMPARED and not (group == "metrics" and name.startswith(BEST))
            if any(value is not None for value in values)
        ]
        if len(rows[group]) > MOST_ROWS:  # of too many, the names that most runs have
            rows[group] = heapq.nlargest(
                MOST_ROWS, rows[group], key=lambda row: len(runs) - row["values"].count(None)
            )
    for row in rows["metrics"]:
        if (best := found["metrics"].get(f"{BEST}{row['name']}")) is not None:
            row |= {"best": list(map(shown, best)), "better": better_when(row["name"])}
    there = {row["name"] for row in rows["metrics"]}
    streams: dict[str, list[str]] = {}
    for phase, metric in sorted(table.metric_counts):
        if f"{phase}/{metric}" in there:
            streams.setdefault(phase, []).append(metric)
    return {
        "runs": [
            {"id": run_id(run), **{name: run[name] for name in ("name", "status", "created")}} for run in runs
        ],
        **rows,
        "streams": [{"stream": stream, "metrics": metrics} for stream, metrics in streams.items()],
    }
