"""The list of runs: filtered by the words of `everstep runs`, sorted, in pages."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from everstep.index.columns import RunColumns
from everstep.index.database import Database
from everstep.index.filters import Group, leaves, matcher, ordered, parse_json, parse_words, paths, why_none
from everstep.index.run_facts import GONE, STATUSES
from everstep.index.run_queries import names_of
from everstep.ui.runs_table import RunsTable, Several, kind_of, run_id, shown

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


def list_runs(table: RunsTable, database: Database, asked: Asked) -> dict[str, Any]:
    """Return the runs that a question means, as JSON.

    Raises:
        ConfigError: the filter cannot be read, or no run can match; says what to do.
    """
    where = _parsed(asked.filter)
    named = [*([] if _is_json(asked.filter) else paths(where)), asked.sort]
    wanted = list(dict.fromkeys(asked.columns or [*table.defaults(), *named]))
    columns = _columns(table, database, [*named, *wanted, *paths(where)], where)
    found = _sorted(_matched(table, where, columns), columns[asked.sort], asked)
    now, sweeps = time.time(), _sweeps(table)
    if asked.grouped:
        found = _grouped(found, sweeps)
    page = found[asked.offset : asked.offset + asked.limit]
    return {
        "total": len(table.runs()),
        "matched": len(found),
        "columns": [
            {"name": name, "kind": _kind(table, name, columns[name]), "of": table.meaning(name)}
            for name in wanted
        ],
        "notes": [note for name in dict.fromkeys(named) if (note := table.noted(name)) is not None],
        "why_none": "" if found or _is_json(asked.filter) else why_none(where),
        "choices": table.choices(),
        "differing": table.differing(),
        "rows": [_row(run, wanted, columns, sweeps.get(run["id"]), now) for run in page],
    }


def numeric_columns(table: RunsTable, database: Database, text: str) -> dict[str, Any]:
    """Return the columns that have a number for some of the runs that a filter selects, as JSON.

    Returns:
        settings, metrics, facts: lists of {name, varied}, which says whether two of the numbers differ.

    Raises:
        ConfigError: as of `list_runs`.
    """
    where = _parsed(text)
    keys = [run["id"] for run in _matched(table, where, _columns(table, database, paths(where), where))]
    told: dict[str, list[dict[str, Any]]] = {"settings": [], "metrics": [], "facts": []}
    for name in table.names():
        group = table.group(name)
        if group == "metrics" and name not in table.pairs() and table.meaning(name) != "best":
            continue  # "step/loss" tells it, too
        values = _numbers(name, table.column(name) or {}, keys)
        if values:
            told[group].append({"name": name, "varied": len(values) > 1})
    return told


def _numbers(name: str, column: Mapping[int, Any], keys: Sequence[int]) -> set[Any]:
    values = {value for key in keys if not isinstance(value := column.get(key), Several)}
    return values - {None} if kind_of(name, values) == "number" else set()


def _kind(table: RunsTable, name: str, column: Mapping[int, Any]) -> str:
    return table.kind(name) if column is table.column(name) else kind_of(name, column.values())


def _row(
    run: Mapping[str, Any], wanted: Sequence[str], columns: Mapping[str, Any], sweep: Any, now: float
) -> dict[str, Any]:
    beat = run["heartbeat"]
    return {
        "id": run_id(run),
        "name": run["name"],
        "status": run["status"],
        "heartbeat": None if beat is None else max(0.0, now - beat),
        "diverged": run["diverged"],
        "sweep": sweep,
        "values": {
            name: shown(columns[name][run["id"]])
            for name in wanted
            if columns[name].get(run["id"]) is not None
        },
    }


def _parsed(text: str) -> Group:
    """Read a filter: comparisons, or JSON."""
    return Group(True, (parse_json(text),)) if _is_json(text) else parse_words(text)


def _is_json(text: str) -> bool:
    return text.lstrip().startswith("{")


def _columns(
    table: RunsTable, database: Database, names: Sequence[str], where: Group
) -> dict[str, Mapping[int, Any]]:
    """Return the columns of some names: those that the table lacks, such as whole objects, from the index."""
    found = {name: table.column(name) for name in names}
    whole = {leaf.path for leaf in leaves(where) if any(isinstance(one, list | dict) for one in leaf.values)}
    texts = [leaf for leaf in leaves(where) if any(isinstance(one, str) for one in leaf.values)]
    odd = [leaf for leaf in texts if leaf.path == "status" or table.kind(leaf.path) in ("number", "time")]
    odd = [leaf for leaf in odd if leaf.path != "status" or not set(leaf.values) <= {*STATUSES}]
    lacking = [name for name, column in found.items() if column is None or name in whole]
    if table.runs() and (lacking or odd):
        with database.read() as connection:
            columns = RunColumns(connection)
            columns.require(leaves(where), lacking, strict=True)
            for name in lacking:
                values = columns.values(name)
                found[name] = {run: Several(several) for run, several in values.items()}
    return {name: {} if column is None else column for name, column in found.items()}


def _matched(
    table: RunsTable, where: Group, columns: Mapping[str, Mapping[int, Any]]
) -> list[Mapping[str, Any]]:
    """Select the runs that meet a filter."""
    holds = matcher(where)

    def values(run: Mapping[str, Any], path: str) -> Sequence[Any]:
        if path == "name":
            return names_of(run["name"])
        column = columns[path]
        if run["id"] not in column:
            return ()
        value = column[run["id"]]
        return value if isinstance(value, Several) else (value,)

    return [run for run in table.runs() if holds(lambda path, run=run: values(run, path))]  # type: ignore[misc]


def _sorted(
    found: list[Mapping[str, Any]], column: Mapping[int, Any], asked: Asked
) -> list[Mapping[str, Any]]:
    plain = [{"run": run, "value": _first(column.get(run["id"]))} for run in found]
    # Stable: ties stay in the order of the table, that of names.
    return [one["run"] for one in ordered(plain, "value", asked.descending)]


def _sweeps(table: RunsTable) -> Mapping[int, Any]:
    """Map runs to their sweeps, without each run in whose directory its trial was trained again."""
    sweeps = table.column("sweep") or {}
    gone = [run for run in table.runs() if run["status"] == GONE and run["id"] in sweeps]
    if not gone:
        return sweeps
    there = {run["path"] for run in table.runs() if run["status"] != GONE}
    replaced = {run["id"] for run in gone if run["path"] in there}
    return {run: sweep for run, sweep in sweeps.items() if run not in replaced}


def _grouped(found: list[Mapping[str, Any]], sweeps: Mapping[int, Any]) -> list[Mapping[str, Any]]:
    """Move the runs of each sweep to the first of them; runs of no sweep come last."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for run in found:
        groups.setdefault(sweeps.get(run["id"]), []).append(run)
    alone = groups.pop(None, [])
    return [run for group in (*groups.values(), alone) for run in group]


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, Several) else value
