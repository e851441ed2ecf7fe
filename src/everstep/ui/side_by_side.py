"""Runs side by side, from the table in memory: settings, metrics, and other facts."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

from everstep.contracts.metrics import better_when
from everstep.index.columns import BEST
from everstep.index.run_facts import FACTS
from everstep.ui.runs_table import RunsTable, run_id, shown
from everstep.views.compare_runs import NOT_COMPARED

MOST_ROWS = 1000
"""Most settings, metrics and facts in a comparison."""


def side_by_side(table: RunsTable, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is known of some runs, a row for each name: as `everstep compare` tells it, without files.

    Returns:
        settings, metrics and facts: each a list of a name and its values, one per run; null where a run
            lacks it.  Metrics are last values, with the best where the name tells what is better.
        streams: which metrics the runs have, all together.
    """
    rows: dict[str, list[dict[str, Any]]] = {"settings": [], "metrics": [], "facts": []}
    pairs = table.pairs()
    for name in table.names():
        group = table.group(name)
        if name in NOT_COMPARED or (group == "metrics" and name not in pairs):
            continue  # "step/loss" tells what "loss" does
        column = table.column(name) or {}
        values = [shown(column.get(run["id"])) for run in runs]
        if any(value is not None for value in values):
            rows[group].append({"name": name, "values": values})
            if group == "metrics" and (best := table.column(f"{BEST}{name}")) is not None:
                values = [shown(best.get(run["id"])) for run in runs]
                rows[group][-1] |= {"best": values, "better": better_when(name)}
    for kind, told in rows.items():  # of too many, the names that most runs have
        if len(told) > MOST_ROWS:
            kept = heapq.nlargest(MOST_ROWS, told, key=lambda row: len(runs) - row["values"].count(None))
            rows[kind] = sorted(kept, key=lambda row: str(row["name"]))
    order = {name: at for at, name in enumerate(FACTS)}
    rows["facts"].sort(key=lambda row: order.get(row["name"], len(order)))
    return {
        "runs": [
            {"id": run_id(run), **{name: run[name] for name in ("name", "status", "created")}} for run in runs
        ],
        **rows,
        "streams": _streams([pairs[row["name"]] for row in rows["metrics"]]),
    }


def _streams(pairs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    found: dict[str, list[str]] = {}
    for phase, metric in pairs:
        found.setdefault(phase, []).append(metric)
    return [{"stream": stream, "metrics": metrics} for stream, metrics in found.items()]
