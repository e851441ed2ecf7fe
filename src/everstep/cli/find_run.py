"""Find the index and the run that a command means."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from everstep.cli.output import note
from everstep.errors import ConfigError, EverstepError
from everstep.index import query
from everstep.index.database import Database
from everstep.index.run_queries import GONE, find_run, run_names
from everstep.index.shipping import gone_runs, id_at, run_dirs, ship


def open_index(index: str | None) -> Database:
    """Open the index, updated from the journals beside it; print their faults as notes.

    Raises:
        RunIndexError: there is neither an index nor a run.
    """
    database, problems = query.open_index(index)
    note(problems)
    return database


class Found(NamedTuple):
    """A run, and the index that has it: `facts` includes its `id` there."""

    database: Database
    facts: dict[str, Any]

    @property
    def id(self) -> int:
        """Key of the run in the index."""
        return int(self.facts["id"])

    @property
    def path(self) -> Path:
        """Directory of the run.

        Raises:
            ConfigError: the directory is gone, or is now that of another run.
        """
        path, name = self.facts["path"], self.facts["name"]
        there = id_at(path)
        if there not in (None, name):
            raise ConfigError(f"the directory of {name} is gone: {path} is now the run {there}; give {there}")
        if self.is_gone:
            raise ConfigError(f"the directory of {name}, {path}, is gone; give another run")
        return Path(path)

    @property
    def is_gone(self) -> bool:
        """Whether the directory of the run is gone."""
        return bool(self.facts["status"] == GONE)


def find(text: str, index: str | None) -> Found:
    """Find the run that RUN means: see `find_all`."""
    return find_all([text], index)[0]


def find_all(texts: Sequence[str], index: str | None, *, exactly: bool = False) -> list[Found]:
    """Find runs by directory (read from the journal alone) or by name in the index.

    Args:
        exactly: refuse the beginning of a name.

    Raises:
        ConfigError: a run is unknown.
        RunDirError, JournalError, RunIndexError: a run cannot be read.
    """
    named = [text for text in texts if not _is_run_dir(text)]
    database = open_index(index) if named else None
    found = []
    for text in texts:
        if database is not None and text in named:
            with database.read() as connection:
                gone = gone_runs(database, connection)
                run = find_run(connection, text, gone, exactly=exactly)
                found.append(Found(database, run | ({"status": GONE} if run["id"] in gone else {})))
        else:
            found.append(_read_alone(Path(text).absolute()))
    return found


def _is_run_dir(text: str) -> bool:
    folder = Path(text)
    if folder.suffix in (".yaml", ".yml") and folder.is_file():
        raise ConfigError(f"{text} is a config file; give a run, or train it: everstep train {text}")
    if folder.is_dir() and run_dirs(folder) == [folder]:
        return True
    if folder.is_dir() and os.sep in text:
        raise ConfigError(f"{text} is not a run directory: it has no run.json; give a run directory")
    return False


def _read_alone(run_dir: Path) -> Found:
    """Read a run from its journal, into an index in memory."""
    database = Database(None)
    note(ship(database, run_dir).problems)
    with database.read() as connection:
        return Found(database, find_run(connection, str(run_dir)))


def names_beginning(text: str, index: str | None) -> list[str]:
    """Return the names in the index that begin with a string, sorted; empty if there is no index."""
    try:
        database = Database(query.index_place(index))
        with database.read() as connection:
            return sorted(name for name in run_names(connection) if name.startswith(text))
    except (EverstepError, OSError):  # nobody reads a message while a line is completed
        return []
