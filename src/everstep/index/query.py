"""Queries to the index: `everstep.query`, and the documents that it returns."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from everstep.arguments import integer
from everstep.display.cells import flat, notebook_html
from everstep.errors import ConfigError, RunIndexError, alike, nearest
from everstep.index.filters import Node, leaves, ordered, parse, sql_condition
from everstep.index.location import FILE, Location, as_location, index_from_here, runs_of
from everstep.index.run_facts import FACTS, SHOWN, IndexBusyError, UnwritableIndexError

if TYPE_CHECKING:
    import pandas
    from sqlalchemy import Connection

    from everstep.index.database import Database

MOST = (1 << 63) - 1
"""Largest limit of documents that a database accepts."""

MOST_METRICS = 8
"""Most metrics in a table of runs."""


class Documents(list[dict[str, Any]]):
    """List of dictionaries that becomes a table: in a notebook, and in pandas.

    Args:
        rows: the documents.
        columns: the fields that a table shows, and the first columns of a frame.
    """

    def __init__(self, rows: Iterable[dict[str, Any]] = (), columns: Sequence[str] = ()) -> None:
        super().__init__(rows)
        self.columns = tuple(dict.fromkeys(columns))

    def to_pandas(self) -> pandas.DataFrame:
        """Return a frame with a row per document, and a column per value.

        A value inside a dictionary has the column that queries name: "config.optimizer.lr".  Lists stay
        lists; a value that a document lacks is missing.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise ConfigError("to_pandas needs pandas, which is not installed: pip install pandas") from None
        rows = [dict(flat(row)) for row in self]
        names = dict.fromkeys(name for row in rows for name in row)
        first = [name for name in self.columns if name in names or not rows]
        return pandas.DataFrame(
            {name: [row.get(name) for row in rows] for name in dict.fromkeys((*first, *names))}
        )

    def _repr_html_(self) -> str:
        return notebook_html("", [("", self, self.columns)]) or "<p>no documents</p>"


def query(
    collection: str,
    where: Mapping[str, Any] | None = None,
    *,
    sort: str | Sequence[str] = (),
    limit: int | None = None,
    fields: Sequence[str] = (),
    index: str | os.PathLike[str] | None = None,
) -> Documents:
    """Search runs, or their records, with MongoDB's filter language.

    The index is first brought up to date with the journals beside it.

    Args:
        collection: "runs", "metrics", "evaluations" or "checkpoints".
        where: a filter, as {"config.optimizer.lr": {"$lt": 0.01}, "status": "finished"}; all if None.
            Operators: $eq $ne $gt $gte $lt $lte $in $exists $not, and $and $or.
        sort: a field, or several; "-NAME" for the largest first.  Documents without the field come last.
        limit: most documents to return, 0 or more; None for all.
        fields: names of the fields in the results; all if empty.
        index: a file, the folder of runs in which it lies, or postgresql://USER@HOST/DATABASE; by default
            the index that the command `everstep` would ask here.

    Returns:
        A list with a dictionary per document, in the order of their start (runs), or as they were written.
        A notebook shows it as a table; `to_pandas()` makes a frame.

    Raises:
        ConfigError: an unknown collection, operator or field, with the nearest; a field that no run has; a
            value that JSON lacks.
        RunIndexError: there is neither an index nor a run, or the index cannot be read.

    Warns:
        RuntimeWarning: a journal is damaged or the index could not be brought up to date.
    """
    asked = Asked(
        parse({} if where is None else where),
        _names("sort", [sort] if isinstance(sort, str) else sort),
        _limit(limit),
        _names("fields", fields),
    )
    place = None if index is None else os.fspath(index)
    found, problems = _answer(collection, asked, place)
    for problem in problems:
        warnings.warn(problem, RuntimeWarning, stacklevel=2)
    columns = asked.fields or _columns(collection, asked.names, found)
    return Documents(found, columns)


def _columns(collection: str, asked: Sequence[str], found: Sequence[dict[str, Any]]) -> Sequence[str]:
    """List the fields that a table shows: of runs those of `everstep runs`, those asked for, and metrics."""
    if collection != "runs":
        return _FIELDS.get(collection, ())
    numbers = (name for run in found for name, value in run.items() if isinstance(value, float))
    metrics = [name for name in dict.fromkeys(numbers) if name not in FACTS]
    return (*SHOWN, *asked, *metrics[:MOST_METRICS])


def _answer(collection: str, asked: Asked, index: str | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the documents, and descriptions of faults in the journals."""
    from everstep.index.shipping import gone_runs

    database, problems = open_index(index)
    with database.read() as connection:
        return ask(connection, collection, asked, gone_runs(database, connection)), problems


def _limit(limit: int | None) -> int | None:
    limit = integer("limit", limit, 0, none="for all")
    return limit and min(limit, MOST)


def _names(what: str, names: Sequence[str]) -> Sequence[str]:
    listed = isinstance(names, Sequence) and not isinstance(names, str)
    if not listed or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{what} is a list of names; change {names!r}")
    return names


# ------------------------------------------------------------------------------ documents

_ROW = ("run", "phase", "name", "epoch", "step", "seq", "value", "count", "wall", "segment")
_FIELDS = {
    "metrics": _ROW,
    "evaluations": _ROW,
    "checkpoints": ("run", "name", "step", "segment", "bytes", "time"),
}
"""Fields of the documents of a collection; those of runs differ."""

COLLECTIONS = ("runs", *_FIELDS)
"""Names of the collections."""


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
        return [*(leaf.path for leaf in leaves(self.where)), *(name for name, _ in self.order), *self.fields]


def ask(
    connection: Connection, collection: str, asked: Asked, gone: Iterable[int] = ()
) -> list[dict[str, Any]]:
    """Return the documents of a collection that a query asks for.

    Args:
        gone: keys of runs whose directories do not exist any more.
    """
    if collection == "runs":
        return _ask_runs(connection, asked, set(gone))
    if collection not in _FIELDS:
        raise ConfigError(f"no collection {collection!r}; {nearest(collection, COLLECTIONS)}")
    return _ask_rows(connection, collection, asked)


def _ask_runs(connection: Connection, asked: Asked, gone: set[int]) -> list[dict[str, Any]]:
    """Return facts, record and last values of runs."""
    from everstep.index.columns import RunColumns, last_values_of
    from everstep.index.run_queries import newest_facts

    columns = RunColumns(connection, gone)
    columns.require(leaves(asked.where), [name for name, _ in asked.order] + list(asked.fields))
    rows = columns.find(asked.where)
    for name, descending in reversed(asked.order):
        columns.add(rows, [name])
        rows = ordered(rows, name, descending)
    rows = rows[: asked.limit]
    keys = [row["id"] for row in rows]
    recorded = newest_facts(connection, keys)
    last = {} if asked.fields else last_values_of(connection, keys)
    documents = [
        {
            **recorded.get(row["id"], {}),
            # reversed: the phase that a bare name means comes first
            **{name: value for (_, name), value in reversed(last.get(row["id"], {}).items())},
            **{fact: row[fact] for fact in FACTS},
        }
        for row in rows
    ]
    tops = {*FACTS, "run", *(name for tree in recorded.values() for name in tree)}
    for name in asked.fields:
        if name.partition(".")[0] not in tops:  # a metric, or what is computed
            values = columns.first(name)
            for key, document in zip(keys, documents, strict=True):
                document.update({name: values[key]} if key in values else {})
    return [project(document, asked.fields) for document in documents] if asked.fields else documents


def _ask_rows(connection: Connection, collection: str, asked: Asked) -> list[dict[str, Any]]:
    from sqlalchemy import select, true

    from everstep.index.sql_tables import checkpoints, runs, valid_metrics

    source: Any = valid_metrics
    columns = {name: valid_metrics.c[name] for name in _ROW}
    written = tuple(valid_metrics.c[name] for name in ("run", "phase", "name", "segment", "offset", "row"))
    if collection == "checkpoints":
        source = checkpoints.join(runs, runs.c.id == checkpoints.c.run)
        columns = {name: checkpoints.c[name] for name in _FIELDS[collection]} | {"run": runs.c.name}
        written = runs.c.name, checkpoints.c.segment, checkpoints.c.offset
    for name in asked.names:
        if name not in columns:
            raise ConfigError(f"{collection} have no field {name!r}; {nearest(name, columns)}")
    kinds = dict.fromkeys(("run", "phase", "name"), "text") | {"wall": "bool"}
    chosen = select(*(columns[name].label(name) for name in dict.fromkeys(asked.fields or columns)))
    chosen = chosen.select_from(source).where(
        columns["phase"].not_in(("head", "step")) if collection == "evaluations" else true(),
        sql_condition(asked.where, lambda name: (columns[name], kinds.get(name, "number"))),
    )
    # A missing value, such as NaN, comes last either way.
    order = (columns[name].desc() if down else columns[name].asc() for name, down in asked.order)
    chosen = chosen.order_by(*(one.nulls_last() for one in order), *written).limit(asked.limit)
    found = [dict(row) for row in connection.execute(chosen).mappings()]
    for row in found:
        if "wall" in row:
            row["wall"] = bool(row["wall"])
        if "value" in row and row["value"] is None:
            row["value"] = math.nan
    return found


def project(document: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return some fields of a document; "a.b" gives the part of `a` that has `b`, or a list on the way."""
    found: dict[str, Any] = {}
    for name in names:
        parts = [name] if name in document else name.split(".")
        value: Any = document
        into = found
        for part in parts:
            if part not in value or into.get(part, value) is value[part]:
                break  # missing; or the whole field above is asked for, too
            value = value[part]
            if part is parts[-1] or not isinstance(value, dict):
                into[part] = value
                break
            into = into.setdefault(part, {})
    return found


# ------------------------------------------------------------------------------ the index


def index_place(index: str | None) -> Location:
    """Find the index that a person names, or the default index."""
    if index is None:
        return index_from_here()
    found = as_location(index)
    if not isinstance(found, Path) or found.is_file():
        return found
    if found.is_dir():
        return found / FILE
    if found.suffix == Path(FILE).suffix:
        return found
    beside = found.parent.iterdir() if found.parent.is_dir() else ()
    near = alike(found.name, (path.name for path in beside if path.is_dir()), cutoff=0.5)
    raise RunIndexError(f"there is no index {found}; {near}give a folder of runs, or a file that ends in .db")


def open_index(index: str | None) -> tuple[Database, list[str]]:
    """Open the index, up to date with the journals beside it; also return descriptions of their faults.

    If a file can be neither written nor read, the journals beside it are read into a temporary index.
    """
    from everstep.index.database import Database
    from everstep.index.shipping import run_dirs, sync

    found = index_place(index)
    folder = runs_of(found)
    if isinstance(found, Path) and not found.exists() and not (folder.is_dir() and run_dirs(folder)):
        raise RunIndexError(f"there are no runs in {folder}: change to a folder with runs, or pass --index")
    database, folders = Database(found), [folder] if folder.is_dir() else []
    try:
        problems = sync(database, folders, named=False).problems
        if not database.exists():  # no run could be shipped: an empty list, and the problems
            with database.write():
                pass
        return database, problems
    except (IndexBusyError, UnwritableIndexError) as error:
        if _readable(database):
            return database, [f"the index may lack the newest rows: {error}"]
        if database.shared:
            raise
        alone = Database(None)
        problems = [f"{error}; the journals in {folder} are read instead"]
        return alone, problems + sync(alone, folders, named=False).problems


def _readable(database: Database) -> bool:
    try:
        with database.read():
            return True
    except RunIndexError:
        return False
