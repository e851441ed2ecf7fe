"""Queries to the index in Python: `everstep.query`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.arguments import integer
from everstep.errors import ConfigError, RunIndexError, alike
from everstep.index.location import FILE, Location, as_location, index_from_here, runs_of

if TYPE_CHECKING:
    from everstep.index.database import Database
    from everstep.index.documents import Asked

MOST = (1 << 63) - 1
"""Largest limit of documents that a database accepts."""


def query(
    collection: str,
    where: Mapping[str, Any] | None = None,
    *,
    sort: str | Sequence[str] = (),
    limit: int | None = None,
    fields: Sequence[str] = (),
    index: str | os.PathLike[str] | None = None,
) -> list[dict[str, Any]]:
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
        A dictionary per document, in the order of their start (runs), or as they were written.

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
    return found


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


def open_index(index: str | None) -> tuple[Database, list[str]]:
    """Open the index, up to date with the journals beside it; also return descriptions of their faults.

    If a file can be neither written nor read, the journals beside it are read into an index in memory.

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
    try:
        return database, sync(database, folders).problems
    except (IndexBusyError, UnwritableIndexError) as error:
        if _readable(database):
            return database, [f"the index may lack the newest rows: {error}"]
        if database.shared:
            raise
        problems, alone = [f"{error}; the journals in {folder} are read instead"], Database(None)
        return alone, problems + sync(alone, folders).problems


def _readable(database: Database) -> bool:
    try:
        with database.read():
            return True
    except RunIndexError:
        return False
