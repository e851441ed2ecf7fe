"""Documents that queries return: their fields, and where the tables have these."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, FromClause, literal, select, true

from everstep.errors import ConfigError, nearest
from everstep.index.computed_columns import is_computed
from everstep.index.filters import is_named, ordered
from everstep.index.mongo import Group, Leaf, Node, Not, paths
from everstep.index.run_facts import FACTS, TEXTS
from everstep.index.run_queries import (
    all_runs,
    is_metric,
    last_values,
    leads_here,
    newest_facts,
    require_known,
    selected_last_values,
    status,
    valid,
)
from everstep.index.sql_tables import checkpoints, fields, metrics, runs, segments, series
from everstep.index.translate import (
    ColumnValues,
    SelectedValues,
    Truth,
    Value,
    Values,
    condition,
    in_column,
    one_of,
)

Document = dict[str, Any]


class Asked(NamedTuple):
    """Query: filter, names to sort by ("-NAME": the largest first), most documents, fields."""

    where: Node
    sort: Sequence[str] = ()
    limit: int | None = None
    fields: Sequence[str] = ()

    @property
    def order(self) -> list[tuple[str, bool]]:
        """Names to sort by, each with whether the largest comes first."""
        return [(name.removeprefix("-"), name.startswith("-")) for name in self.sort]

    @property
    def names(self) -> list[str]:
        """Names of all fields in the query."""
        return [*paths(self.where), *(name for name, _ in self.order), *self.fields]


def ask(connection: Connection, collection: str, asked: Asked, gone: Collection[int] = ()) -> list[Document]:
    """Return the documents of a collection that a query asks for.

    Args:
        gone: keys of runs whose directories do not exist any more.

    Raises:
        ConfigError: there is no such collection, or no such field; names the nearest.
    """
    if collection == "runs":
        return _ask_runs(connection, asked, gone)
    if collection == "configs":
        return _ask_configs(connection, asked)
    if collection not in _TABLES:
        raise ConfigError(f"no collection {collection!r}; {nearest(collection, COLLECTIONS)}")
    return _ask_table(connection, _TABLES[collection], asked)


def project(document: Document, names: Iterable[str]) -> Document:
    """Return some fields of a document; "a.b" gives the part of `a` that has `b`."""
    found: Document = {}
    asked = set(names := list(names))
    for name in names:
        parts = name.split(".")
        if name not in document and any(".".join(parts[:end]) in asked for end in range(1, len(parts))):
            continue  # the whole field above is requested, too
        if name in document:
            found[name] = document[name]
            continue
        top, _, rest = name.partition(".")
        if rest and top in document:
            _merge(found, top, _dig(document[top], rest))
    return found


def _dig(value: Any, path: str) -> Any:
    """Return the part of a tree that lies on a path; in a list, the part of each object."""
    if isinstance(value, list):
        return [_dig(item, path) for item in value if isinstance(item, dict)]
    return project(value, [path]) if isinstance(value, dict) else None


def _merge(into: Document, key: str, value: Any) -> None:
    there = into.get(key)
    if isinstance(there, dict) and isinstance(value, dict):
        for name, item in value.items():
            _merge(there, name, item)
    elif isinstance(there, list) and isinstance(value, list):
        for old, new in zip(there, value, strict=True):  # parts of the same objects, by two paths
            for name, item in new.items():
                _merge(old, name, item)
    elif value is not None:
        into[key] = value


# --------------------------------------------------------------------------------- runs and configs


def run_condition(connection: Connection, where: Node, gone: Collection[int]) -> Truth:
    """Turn a filter over runs into a condition on the table `runs`."""
    columns = {name: _run_column(connection, name, gone) for name in FACTS}

    @cache
    def values(path: str) -> Values:
        if path in columns:
            return columns[path]
        if is_metric(connection, path):
            last = selected_last_values(path).subquery()
            number = Value({"number": true()}, last.c.value, literal(None))
            return SelectedValues(runs.c.id, number, select(last.c.run))
        if is_computed(connection, path):
            raise ConfigError(f"a filter in JSON cannot have {path!r}; compare it in words, as in '{path}>0'")
        require_known(connection, path)
        return _recorded(connection, path)

    return condition(connection, _by_name(connection, where), values)


def _by_name(connection: Connection, node: Node) -> Node:
    """Change a filter so that {"name": "digits"} also means runs whose names are that without six digits."""
    if isinstance(node, Group):
        return node._replace(parts=tuple(_by_name(connection, part) for part in node.parts))
    if isinstance(node, Not):
        return Not(_by_name(connection, node.part))
    if node.path != "name" or node.operator not in ("$eq", "$in"):
        return node
    given = node.value if node.operator == "$in" else [node.value]
    texts = [each for each in given if isinstance(each, str)]
    names = connection.execute(select(runs.c.name).distinct()).scalars().all() if texts else []
    return Leaf("name", "$in", [*given, *(n for n in names if any(is_named(n, text) for text in texts))])


def _run_column(connection: Connection, name: str, gone: Collection[int]) -> ColumnValues:
    kind = "text" if name in TEXTS else "number"
    source = status(connection, gone) if name == "status" else runs.c[name]
    return in_column(kind, source, select(source).distinct())


def _recorded(connection: Connection, path: str) -> Values:
    kinds = {kind: fields.c.kind == kind for kind in ("null", "bool", "number", "text", "list", "object")}
    rows = select(fields.c.run).where(leads_here(connection, path))
    return SelectedValues(runs.c.id, Value(kinds, fields.c.number, fields.c.text), rows)


def _chosen(
    connection: Connection, asked: Asked, gone: Collection[int], where: Truth
) -> list[Mapping[str, Any]]:
    """Return the runs that a query asks for, in order."""
    found: list[Mapping[str, Any]] = list(
        all_runs(connection, [name for name, _ in asked.order], gone, where)
    )
    for name, descending in reversed(asked.order):
        found = ordered(found, name, descending)
    return found[: asked.limit]


def _ask_runs(connection: Connection, asked: Asked, gone: Collection[int]) -> list[Document]:
    """Return facts of runs, the records of their newest starts, and the last value of each metric."""
    found = _chosen(connection, asked, gone, run_condition(connection, asked.where, gone))
    recorded = newest_facts(connection, [run["id"] for run in found])
    documents = {
        run["id"]: {**recorded.get(run["id"], {}), **{name: run[name] for name in FACTS}} for run in found
    }
    for name in _metrics_for(connection, asked, documents):
        values = last_values(connection, name)
        for run in documents.keys() & values.keys():
            documents[run][name] = values[run]
    if not asked.fields:
        return list(documents.values())
    return [project(document, asked.fields) for document in documents.values()]


def _metrics_for(connection: Connection, asked: Asked, documents: Collection[int]) -> list[str]:
    """List the metrics in the documents of some runs: all, or the requested ones."""
    if not asked.fields:
        names = select(series.c.name).where(one_of(connection, series.c.run, documents)).distinct()
        return [name for name in connection.execute(names).scalars() if name not in FACTS]
    wanted = [name for name in asked.fields if name not in FACTS]
    found = [name for name in wanted if is_metric(connection, name)]
    for name in wanted:
        if name not in found:
            require_known(connection, name)
    return found


def _ask_configs(connection: Connection, asked: Asked) -> list[Document]:
    """Return documents with `run`, and `config` as the newest start recorded it."""
    for name in asked.names:
        if name != "run" and name.partition(".")[0] != "config":
            raise ConfigError(f"configs have no field {name!r}; {nearest(name, ('config', 'run'))}")

    def values(path: str) -> Values:
        if path == "run":
            return in_column("text", runs.c.name, select(runs.c.name))
        return _recorded(connection, path)

    by_name = {"run": "name", "-run": "-name"}
    renamed = asked._replace(sort=[by_name.get(name, name) for name in asked.sort])
    found = _chosen(connection, renamed, (), condition(connection, asked.where, values))
    recorded = newest_facts(connection, [run["id"] for run in found])
    documents: list[Document] = [
        {"run": run["name"], "config": recorded.get(run["id"], {}).get("config")} for run in found
    ]
    return [project(document, asked.fields) for document in documents] if asked.fields else documents


# ----------------------------------------------------------------- metrics, evaluations, checkpoints


class _Collection(NamedTuple):
    """Collection whose documents are rows: its fields, their source, and their order."""

    name: str
    columns: Mapping[str, ColumnElement[Any]]
    source: FromClause
    order: tuple[ColumnElement[Any], ...]
    where: Truth


_ROWS = {
    "run": runs.c.name,
    "phase": series.c.phase,
    "name": series.c.name,
    "epoch": metrics.c.epoch,
    "step": metrics.c.step,
    "seq": metrics.c.seq,
    "value": metrics.c.value,
    "count": metrics.c["count"],
    "wall": metrics.c.wall,
    "segment": metrics.c.segment,
}
_MEASURED = (
    metrics.join(series, series.c.id == metrics.c.series)
    .join(segments, (segments.c.run == series.c.run) & valid())
    .join(runs, runs.c.id == series.c.run)
)
_WRITTEN = (runs.c.name, series.c.phase, series.c.name, metrics.c.segment, metrics.c.offset, metrics.c.row)
_COMMITS = {
    "run": runs.c.name,
    "name": checkpoints.c.name,
    "step": checkpoints.c.step,
    "segment": checkpoints.c.segment,
    "bytes": checkpoints.c.bytes,
    "time": checkpoints.c.time,
}

_TABLES = {
    "metrics": _Collection("metrics", _ROWS, _MEASURED, _WRITTEN, true()),
    "evaluations": _Collection(
        "evaluations", _ROWS, _MEASURED, _WRITTEN, series.c.phase.not_in(("head", "step"))
    ),
    "checkpoints": _Collection(
        "checkpoints",
        _COMMITS,
        checkpoints.join(runs, runs.c.id == checkpoints.c.run),
        (runs.c.name, checkpoints.c.segment, checkpoints.c.offset),
        true(),
    ),
}
COLLECTIONS = ("runs", "configs", *_TABLES)
"""Names of the collections."""


def fields_of(collection: str) -> tuple[str, ...]:
    """List the fields of a collection's documents; of runs, whose fields differ, none."""
    return tuple(_TABLES[collection].columns) if collection in _TABLES else ()


_ROW_TEXTS = ("run", "phase", "name")


def _ask_table(connection: Connection, table: _Collection, asked: Asked) -> list[Document]:
    for name in asked.names:
        if name not in table.columns:
            raise ConfigError(f"{table.name} have no field {name!r}; {nearest(name, table.columns)}")
    names = list(dict.fromkeys(asked.fields or table.columns))
    found = (
        select(*(table.columns[name].label(name) for name in names))
        .select_from(table.source)
        .where(table.where, condition(connection, asked.where, lambda path: _column(table, path)))
        .order_by(*(_sorted(table.columns[name], down) for name, down in asked.order), *table.order)
        .limit(asked.limit)
    )
    return [_as_python(dict(row)) for row in connection.execute(found).mappings()]


def _column(table: _Collection, name: str) -> Values:
    source = table.columns[name]
    kind = "text" if name in _ROW_TEXTS else "bool" if name == "wall" else "number"
    return in_column(kind, source, select(source).distinct(), nan=name == "value")


def _sorted(source: ColumnElement[Any], descending: bool) -> ColumnElement[Any]:
    """Sort key: a missing value, such as NaN, comes last either way."""
    return source.desc().nulls_last() if descending else source.asc().nulls_last()


def _as_python(row: Document) -> Document:
    if "wall" in row:
        row["wall"] = bool(row["wall"])
    if "value" in row and row["value"] is None:
        row["value"] = math.nan
    return row
