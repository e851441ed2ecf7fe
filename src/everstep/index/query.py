"""Queries to the index in Python: `everstep.query`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.arguments import integer
from everstep.errors import ConfigError, RunIndexError, alike
from everstep.index.answer import Documents
from everstep.index.location import FILE, Location, as_location, index_from_here, runs_of

if TYPE_CHECKING:
    from everstep.index.database import Database
    from everstep.index.documents import Asked
    from everstep.index.mongo import Node

MOST = (1 << 63) - 1
"""Largest limit of documents that a database accepts."""

MOST_METRICS = 8
"""Most metrics in a table of runs."""


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
        collection: "runs", "configs", "metrics", "evaluations" or "checkpoints".
        where: a filter, as {"config.optimizer.lr": {"$lt": 0.01}, "status": "finished"}; all if None.
            Operators: $eq $ne $gt $gte $lt $lte $in $nin $exists $regex $not, and $and $or.
        sort: a field, or several; "-NAME" for the largest first.  Documents without the field come last.
        limit: most documents to return, 0 or more; None for all.
        fields: names of the fields in the results; all if empty.
        index: a file, the folder of runs in which it lies, or postgresql://USER@HOST/DATABASE; by default
            the index that the command `everstep` would ask here.

    Returns:
        A list with a dictionary per document, in the order of their start (runs), or as they were written.
        A notebook shows it as a table, with charts of metrics; `to_pandas()` and `to_polars()` make frames.

    Raises:
        ConfigError: an unknown collection, operator or field, with the nearest; a condition that holds of no
            run; a value that JSON lacks; a pattern that takes too long.
        RunIndexError: there is neither an index nor a run, or the index cannot be read.

    Warns:
        RuntimeWarning: a journal is damaged or the index could not be brought up to date.
    """
    from everstep.index.documents import Asked
    from everstep.index.index_errors import again_if_malformed
    from everstep.index.mongo import parse

    asked = Asked(
        parse({} if where is None else where),
        _names("sort", [sort] if isinstance(sort, str) else sort),
        _limit(limit),
        _names("fields", fields),
    )
    place = None if index is None else os.fspath(index)
    malformed: list[str] = []
    found, problems = again_if_malformed(lambda: _answer(collection, asked, place), malformed.append)
    for problem in malformed + problems:
        warnings.warn(problem, RuntimeWarning, stacklevel=2)
    columns = asked.fields or _columns(collection, asked.names, found)
    return Documents(found, columns, metric=_only_metric(asked.where))


def _only_metric(where: Node) -> str | None:
    """Return the metric of which a filter asks for all rows; None if there may be several."""
    from everstep.index.mongo import Group, Leaf

    parts = where.parts if isinstance(where, Group) and where.every else (where,)
    named = [part.value for part in parts if isinstance(part, Leaf) and part[:2] == ("name", "$eq")]
    return named[0] if named and isinstance(named[0], str) else None


def _columns(collection: str, asked: Sequence[str], found: Sequence[dict[str, Any]]) -> Sequence[str]:
    """List the fields that a table shows: of runs those of `everstep runs`, those asked for, and metrics."""
    from everstep.index.documents import fields_of
    from everstep.index.run_facts import FACTS, SHOWN

    if collection != "runs":
        return fields_of(collection)
    numbers = (name for run in found for name, value in run.items() if isinstance(value, float))
    metrics = [name for name in dict.fromkeys(numbers) if name not in FACTS]
    return (*SHOWN, *asked, *metrics[:MOST_METRICS])


def _answer(collection: str, asked: Asked, index: str | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the documents, and descriptions of faults in the journals."""
    from everstep.index.documents import ask
    from everstep.index.mongo import leaves
    from everstep.index.query_checks import require_comparable
    from everstep.index.shipping import gone_runs

    database, problems = open_index(index)
    with database.read() as connection:
        found = ask(connection, collection, asked, gone_runs(database, connection))
        if collection == "runs":
            require_comparable(connection, leaves(asked.where))
        return found, problems


def _limit(limit: int | None) -> int | None:
    limit = integer("limit", limit, 0, none="for all")
    return limit and min(limit, MOST)


def _names(what: str, names: Sequence[str]) -> Sequence[str]:
    listed = isinstance(names, Sequence) and not isinstance(names, str)
    if not listed or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{what} is a list of names; change {names!r}")
    return names


def index_place(index: str | None) -> Location:
    """Find the index that a person names, or the default index.

    Raises:
        RunIndexError: the named index does not exist, and its name does not end in .db.
    """
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


def open_index(index: str | None, spare: Path | None = None) -> tuple[Database, list[str]]:
    """Open the index, up to date with the journals beside it; also return descriptions of their faults.

    If a file can be neither written nor read, the journals beside it are read into another index.

    Args:
        spare: the file of that other index; None for an index in memory.

    Raises:
        RunIndexError: there is neither an index nor a run, or the index cannot be used.
        MalformedIndexError: the index was damaged and is set aside; the next call makes it again.
    """
    from everstep.index.database import Database
    from everstep.index.index_errors import IndexBusyError, UnwritableIndexError
    from everstep.index.shipping import run_dirs, sync

    found = index_place(index)
    folder = runs_of(found)
    if isinstance(found, Path) and not found.exists() and not (folder.is_dir() and run_dirs(folder)):
        raise RunIndexError(f"there are no runs in {folder}: change to a folder with runs, or pass --index")
    database, folders = Database(found), [folder] if folder.is_dir() else []
    if isinstance(found, Path) and (owner := _linked_folder(found)):
        problems = [
            f"{found} is a link to the index of {owner}, which has runs of its own; the journals in {folder} "
            f"are read instead, and --index {owner} names that index"
        ]
        alone = Database(spare)
        return alone, problems + sync(alone, folders, named=False).problems
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
        problems, alone = [f"{error}; the journals in {folder} are read instead"], Database(spare)
        return alone, problems + sync(alone, folders, named=False).problems


def _linked_folder(index: Path) -> Path | None:
    """Return the folder of runs whose index another folder's index is a link to; None if there is none."""
    from everstep.index.shipping import run_dirs

    folder = index.resolve().parent
    linked = index.is_symlink() and folder != index.parent.resolve()
    return folder if linked and folder.is_dir() and run_dirs(folder) else None


def _readable(database: Database) -> bool:
    try:
        with database.read():
            return True
    except RunIndexError:
        return False
