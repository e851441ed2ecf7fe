"""Queries to the index: `everstep.query`, and the documents that it returns."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.arguments import integer
from everstep.display.cells import flat
from everstep.errors import ConfigError, RunIndexError, alike, nearest
from everstep.index import FACTS, SHOWN, IndexBusyError, UnwritableIndexError
from everstep.index.filters import Node, leaves, matcher, ordered, parse
from everstep.index.location import FILE, Location, as_location, index_from_here, runs_of

if TYPE_CHECKING:
    import pandas
    import polars

    from everstep.index.database import Database

_MOST_METRICS = 8
"""Most metrics in a table of runs."""
_ROW = ("run", "phase", "name", "epoch", "step", "seq", "value", "count", "wall", "segment")
_SAVE = ("run", "name", "step", "segment", "bytes", "time")
_FIELDS = {"metrics": _ROW, "evaluations": _ROW, "checkpoints": _SAVE}
"""Fields of the documents of a collection; those of runs differ."""
COLLECTIONS = ("runs", *_FIELDS)


class Documents(list[dict[str, Any]]):
    """List of dictionaries that becomes a table: in a notebook, in pandas, and in polars.

    A frame has a row per document, and a column per value: a value inside a dictionary has the column that
    queries name ("config.optimizer.lr").  Lists stay lists; a value that a document lacks is missing.  The
    columns `times`, in documents seconds since 1970, are datetimes in UTC.
    """

    def __init__(
        self,
        rows: Iterable[dict[str, Any]] = (),
        columns: Sequence[str] = (),
        times: Collection[str] = ("created", "started", "heartbeat"),
    ) -> None:
        super().__init__(rows)
        self.columns, self._times = tuple(dict.fromkeys(columns)), times

    def to_pandas(self) -> pandas.DataFrame:
        """Return a frame of pandas."""
        rows, names = self._flat()
        frame: pandas.DataFrame = _import("pandas").DataFrame(rows, columns=names)
        return frame

    def to_polars(self) -> polars.DataFrame:
        """Return a frame of polars; a column with values of several types has strings."""
        rows, names = self._flat()
        columns = {name: [row.get(name) for row in rows] for name in names}
        frame: polars.DataFrame = _import("polars").DataFrame(columns, strict=False)
        return frame

    def _flat(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return a flat dictionary for each document, and the names of the columns."""
        rows = [dict(flat(row)) for row in self]
        for row in rows:
            for name in row.keys() & self._times:
                is_time = row[name] is not None and 0 <= row[name] < 1e11
                row[name] = datetime.fromtimestamp(row[name], UTC) if is_time else None
        names = dict.fromkeys(name for row in rows for name in row)
        first = [name for name in self.columns if name in names or not rows]
        return rows, [*dict.fromkeys((*first, *names))]

    def _repr_html_(self) -> str:
        from everstep.display.html import charts_of, notebook_html

        return notebook_html("" if self else "no documents", charts_of(self), [("", self, self.columns)])


def _import(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        problem = f"to_{package} needs {package}, which is not installed"
        raise ConfigError(f"{problem}: pip install {package}") from None


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
        Documents of runs have the names in `where` and `sort`, too ("best/valid_loss").  A notebook shows
        the list as a table, with charts of metrics; `to_pandas()` and `to_polars()` make frames.

    Warns:
        RuntimeWarning: a journal is damaged or the index could not be brought up to date.
    """
    node = parse({} if where is None else where)
    sort = _names("sort", [sort] if isinstance(sort, str) else sort)
    limit, fields = integer("limit", limit, 0, none="for all"), _names("fields", fields)
    database, problems = open_index(None if index is None else os.fspath(index))
    documents = ask(database, collection, node, sort, limit, fields)
    for problem in problems:
        warnings.warn(problem, RuntimeWarning, stacklevel=2)
    columns = fields or _FIELDS.get(collection, ())
    if not columns:  # of runs those of `everstep runs`, those in the query, and metrics
        names = [*(leaf.path for leaf in leaves(node)), *(name.removeprefix("-") for name in sort)]
        numbers = (name for run in documents for name, value in run.items() if isinstance(value, float))
        metrics = [name for name in dict.fromkeys(numbers) if name not in FACTS]
        columns = (*SHOWN, *names, *metrics[:_MOST_METRICS])
    return Documents(documents, columns, *([("time",)] if collection == "checkpoints" else []))


def _names(argument: str, names: Sequence[str]) -> Sequence[str]:
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    if not is_list or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{argument} is a list of names; change {names!r}")
    return names


def ask(
    database: Database,
    collection: str,
    where: Node,
    sort: Sequence[str] = (),
    limit: int | None = None,
    fields: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Return the documents of a collection that a query asks for: see `query`."""
    from everstep.index.run_queries import rows_of

    # the first name counts most: documents are sorted by it last
    order = [(name.removeprefix("-"), name.startswith("-")) for name in reversed(sort)]
    if collection == "runs":
        return _ask_runs(database, where, order, limit, fields)
    known = _FIELDS.get(collection)
    if known is None:
        raise ConfigError(f"no collection {collection!r}; {nearest(collection, COLLECTIONS)}")
    for name in [*(leaf.path for leaf in leaves(where)), *(name for name, _ in order), *fields]:
        if name not in known:
            raise ConfigError(f"{collection} have no field {name!r}; {nearest(name, known)}")
    holds = matcher(where)
    with (
        database.read() as connection,
        contextlib.closing(rows_of(connection, collection, known, where)) as rows,
    ):
        matches: Iterable[dict[str, Any]] = (row for row in rows if holds(lambda name, row=row: [row[name]]))  # type: ignore[misc]
        for name, descending in order:
            matches = ordered(matches, name, descending)
        most = limit and min(limit, sys.maxsize)
        return [{name: row[name] for name in fields or known} for row in islice(matches, most)]


Order = Sequence[tuple[str, bool]]
"""Names to sort by, the one that counts most last, and whether the largest come first."""


def _ask_runs(
    database: Database, where: Node, order: Order, limit: int | None, fields: Sequence[str]
) -> list[dict[str, Any]]:
    from everstep.index.run_queries import RunColumns, last_values_of, newest_facts

    columns, names = RunColumns(database), [*(leaf.path for leaf in leaves(where)), *(n for n, _ in order)]
    rows = columns.find(where, [*(name for name, _ in order), *fields])
    columns.add(rows, names)
    for name, descending in order:
        rows = ordered(rows, name, descending)
    rows = rows[:limit]
    keys = [row["id"] for row in rows]
    if fields:
        documents = [{name: row[name] for name in fields if name in FACTS} for row in rows]
        for name in (name for name in fields if name not in FACTS):
            column = columns.values(name)
            for document, key in zip(documents, keys, strict=True):
                if values := column.get(key):
                    # a list of values where the path goes through a list of objects
                    document[name] = values[0] if len(values) == 1 or isinstance(values[0], list) else values
        return documents
    with database.read() as connection:
        trees, last = newest_facts(connection, keys), last_values_of(connection, keys)
    documents = []
    for row in rows:
        # reversed: the phase that a bare name means comes first, and counts
        metrics = {name: value for (_, name), value in reversed(last.get(row["id"], {}).items())}
        document = {**metrics, **trees.get(row["id"], {}), **{name: row[name] for name in FACTS}}
        for name in names:  # a best value, a metric of one phase, a path through a list
            if name in row and not any(f"{path}.".startswith(f"{name}.") for path, _ in flat(document)):
                document[name] = row[name]
        documents.append(document)
    return documents


def index_place(index: str | None) -> Location:
    """Find the index that a person names, or the default index."""
    if index is None:
        return index_from_here()
    place = as_location(index)
    if isinstance(place, Path) and place.is_dir():
        return place / FILE
    if not isinstance(place, Path) or place.is_file() or place.suffix == Path(FILE).suffix:
        return place
    beside = place.parent.iterdir() if place.parent.is_dir() else ()
    hint = alike(place.name, (path.name for path in beside if path.is_dir()), cutoff=0.5)
    raise RunIndexError(f"there is no index {place}; {hint}give a folder of runs, or a file that ends in .db")


def open_index(index: str | None, *, stale: bool = False) -> tuple[Database, list[str]]:
    """Open the index, up to date with the journals beside it; also return descriptions of their faults.

    `stale`: an index that is there may stay as it is; the caller brings it up to date.
    If a file can be neither written nor read, the journals beside it are read into a temporary index.
    """
    from everstep.index.database import Database
    from everstep.index.shipping import run_dirs, sync

    place = index_place(index)
    folder = runs_of(place)
    if isinstance(place, Path) and not place.exists() and not (folder.is_dir() and run_dirs(folder)):
        raise RunIndexError(f"there are no runs in {folder}: change to a folder with runs, or pass --index")
    database, folders = Database(place), [folder] if folder.is_dir() else []
    try:
        if stale and database.exists():
            with database.read():
                return database, []
        problems = sync(database, folders, explicit=False).problems
        if not database.exists():  # no run could be shipped: an empty list, and the problems
            with database.write():
                pass
        return database, problems
    except (IndexBusyError, UnwritableIndexError) as error:
        try:
            with database.read():
                return database, [f"the index may lack the newest rows: {error}"]
        except RunIndexError:
            if database.shared:
                raise error from None
        alone = Database(None)
        problems = [f"{error}; the journals in {folder} are read instead"]
        return alone, problems + sync(alone, folders, explicit=False).problems
