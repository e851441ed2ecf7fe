"""Which index and which run a command means."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from everstep.cli.output import note
from everstep.errors import ConfigError, RunIndexError
from everstep.index.database import Database, IndexBusyError
from everstep.index.location import FILE, Place, index_from_here, place, runs_of
from everstep.index.queries import find_run
from everstep.index.shipping import is_here, is_run, run_dirs, ship, sync

GONE = "gone"
"""The status of a run whose directory is not there any more: moved, or deleted."""

F = TypeVar("F", bound=Callable[..., Any])


def index_option(function: F) -> F:
    """The option --index of every command that asks the index."""
    option = click.option(
        "--index",
        "index",
        metavar="PATH|URL",
        help="The index: a file, the folder of runs that it lies in, or postgresql://USER@HOST/DATABASE.",
    )
    return option(function)


def json_option(function: F) -> F:
    """The option --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def index_place(index: str | None) -> Place:
    """Where the index is that --index names, or that is meant without it."""
    if index is None:
        return index_from_here()
    found = place(index)
    return found / FILE if isinstance(found, Path) and found.is_dir() else found


def open_index(index: str | None) -> Database:
    """The index, brought up to what the journals beside it say.

    Raises:
        RunIndexError: there is neither an index nor a run.
    """
    found = index_place(index)
    folder = runs_of(found)
    if isinstance(found, Path) and not found.exists() and not (folder.is_dir() and run_dirs(folder)):
        raise RunIndexError(f"there are no runs in {folder}: go where they are, or pass --index")
    database = Database(found)
    try:
        note(sync(database, [folder] if folder.is_dir() else []).problems)
    except RunIndexError as error:
        if not database.exists() or (database.shared and not isinstance(error, IndexBusyError)):
            raise
        note([f"the index may lack what is newest: {error}"])
    return database


class Found(NamedTuple):
    """A run, and the index that knows it: `facts` has its `id` there."""

    database: Database
    facts: dict[str, Any]

    @property
    def id(self) -> int:
        """Its key in the index."""
        return int(self.facts["id"])

    @property
    def path(self) -> Path:
        """Its directory."""
        return Path(self.facts["path"])


def as_it_stands(database: Database, facts: Mapping[str, Any]) -> dict[str, Any]:
    """A run's facts, with the status "gone" if its directory is not where the index has it.

    Of a run on another machine that shares the index, the status is what was heard last.
    """
    gone = is_here(database, facts["host"]) and not is_run(facts["path"])
    return {**facts, **({"status": GONE} if gone else {})}


def find(text: str, index: str | None) -> Found:
    """The run that RUN means: see `find_all`."""
    return find_all([text], index)[0]


def find_all(texts: Sequence[str], index: str | None) -> list[Found]:
    """The runs that are meant: directories, read from their journals alone, or names in the index.

    Raises:
        ConfigError: there is no such run.
        RunDirError, JournalError, RunIndexError: it cannot be read.
    """
    named = [text for text in texts if not _is_run_dir(text)]
    database = open_index(index) if named else None
    found = []
    for text in texts:
        if database is not None and text in named:
            with database.read() as connection:
                found.append(Found(database, as_it_stands(database, find_run(connection, text))))
        else:
            found.append(_read_alone(Path(text).absolute()))
    return found


def _is_run_dir(text: str) -> bool:
    folder = Path(text)
    if folder.is_dir() and run_dirs(folder) == [folder]:
        return True
    if folder.is_dir() and os.sep in text:
        raise ConfigError(f"{text} is no run directory: it has no run.json; give one that has")
    return False


def _read_alone(run_dir: Path) -> Found:
    """A run as its journal has it, in an index of its own."""
    database = Database(None)
    note(ship(database, run_dir).problems)
    with database.read() as connection:
        return Found(database, find_run(connection, str(run_dir)))
