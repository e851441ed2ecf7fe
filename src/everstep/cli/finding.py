"""Which index and which run a command means."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from everstep.cli.output import note
from everstep.errors import ConfigError, RunIndexError
from everstep.index.database import Database
from everstep.index.location import index_from_here
from everstep.index.queries import find_run
from everstep.index.shipping import is_run, run_dirs, ship, sync

GONE = "gone"
"""The status of a run whose directory is not there any more: moved, or deleted."""

F = TypeVar("F", bound=Callable[..., Any])


def index_option(function: F) -> F:
    """The option --index of every command that asks the index."""
    option = click.option(
        "--index",
        "index",
        type=click.Path(path_type=Path),
        help="The index, or the folder of runs that it lies in.",
    )
    return option(function)


def json_option(function: F) -> F:
    """The option --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def index_path(index: Path | None) -> Path:
    """The index's file."""
    if index is None:
        return index_from_here()
    return index.absolute() / "everstep.db" if index.is_dir() else index.absolute()


def open_index(index: Path | None) -> Database:
    """The index, brought up to what the journals beside it say.

    Raises:
        RunIndexError: there is neither an index nor a run.
    """
    path = index_path(index)
    if not path.exists() and not (path.parent.is_dir() and run_dirs(path.parent)):
        raise RunIndexError(f"there are no runs in {path.parent}: go where they are, or pass --index")
    database = Database(path)
    try:
        note(sync(database, [path.parent] if path.parent.is_dir() else []).problems)
    except RunIndexError as error:
        if not path.exists():
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


def as_it_stands(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A run's facts, with the status "gone" if its directory is not where the index has it."""
    return {**facts, **({} if is_run(facts["path"]) else {"status": GONE})}


def find(text: str, index: Path | None) -> Found:
    """The run that RUN means: see `find_all`."""
    return find_all([text], index)[0]


def find_all(texts: Sequence[str], index: Path | None) -> list[Found]:
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
                found.append(Found(database, as_it_stands(find_run(connection, text))))
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
