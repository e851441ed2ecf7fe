"""Find the index and the run that a command means.

The index is imported in the functions: most commands have this module, and their help needs no index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from everstep.cli.output import note
from everstep.errors import EverstepError, RunIndexError

if TYPE_CHECKING:
    from pathlib import Path

    from everstep.index.database import Database
    from everstep.views.find_run import Found


def open_index(index: str | None) -> Database:
    """Open the index, updated from the journals beside it; print their faults as notes."""
    from everstep.index import query

    database, problems = query.open_index(index)
    note(problems)
    return database


def find(text: str, index: str | None) -> Found:
    """Find the run that RUN means: see `find_all`."""
    return find_all([text], index)[0]


def find_all(texts: Sequence[str], index: str | None, *, exactly: bool = False) -> list[Found]:
    """Find runs as `everstep.views.find_run.find_all` does; print faults as notes."""
    from everstep.views import find_run

    return find_run.find_all(texts, index, note, exactly=exactly)


def ship_labels(found: Found, index: str | None) -> None:
    """Ship the labels of a run, which have changed, to its index, if there is one.

    Args:
        index: what --index names.
    """
    from everstep.index.shipping import ship

    database = index_with(found.path, index)
    if database is None:
        return
    try:
        if database.exists():
            note(ship(database, found.path).problems)
    except RunIndexError as error:
        note([f"the index does not have them yet: {error}"])


def index_with(run_dir: Path, index: str | None) -> Database | None:
    """Return the index to which a run is shipped, which may not exist; None if it is off.

    Args:
        index: what --index names.
    """
    from everstep.index import query
    from everstep.index.database import Database
    from everstep.index.location import index_of

    place = index_of(run_dir) if index is None else query.index_place(index)
    return None if place is None else Database(place)


def names_beginning(text: str, index: str | None) -> list[str]:
    """Return the names in the index that begin with a string, sorted; empty if there is no index."""
    from everstep.index import query
    from everstep.index.database import Database
    from everstep.index.run_queries import run_names

    try:
        database = Database(query.index_place(index))
        with database.read() as connection:
            return sorted(name for name in run_names(connection) if name.startswith(text))
    except (EverstepError, OSError):  # nobody reads a message while a line is completed
        return []
