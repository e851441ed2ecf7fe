"""Find the run that a person means: a run directory, or a name in the index."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from everstep.errors import ConfigError
from everstep.index import GONE, query
from everstep.index.database import Database
from everstep.index.location import id_at, is_run
from everstep.index.run_queries import find_run
from everstep.index.shipping import ship


class Found(NamedTuple):
    """A run, and the index that has it: `facts` is its row in the table `runs`."""

    database: Database
    facts: dict[str, Any]

    @property
    def id(self) -> int:
        """Key of the run in the index."""
        return int(self.facts["id"])

    @property
    def path(self) -> Path:
        """Directory of the run."""
        path, name = self.facts["path"], self.facts["name"]
        other = id_at(path)
        if other not in (None, name):
            raise ConfigError(f"the directory of {name} is gone: {path} is now the run {other}; give {other}")
        if self.is_gone:
            raise ConfigError(f"the directory of {name}, {path}, is gone; give another run")
        return Path(path)

    @property
    def is_gone(self) -> bool:
        return bool(self.facts["status"] == GONE)


def find_all(
    texts: Sequence[str], index: str | None, note: Callable[[list[str]], object], *, exactly: bool = False
) -> list[Found]:
    """Find runs by directory (read from the journal alone) or by name in the index; `note` takes faults."""
    names = [text for text in texts if not _is_run_dir(text)]
    database, problems = query.open_index(index) if names else (None, [])
    note(problems)
    entries = []
    for text in texts:
        if database is not None and text in names:
            with database.read() as connection:
                run = find_run(connection, text, exactly=exactly, place=database.name)
            entries.append(Found(database, run))
        else:
            alone = Database(None)
            note(ship(alone, Path(text).absolute()).problems)
            with alone.read() as connection:
                entries.append(Found(alone, find_run(connection, str(Path(text).absolute()))))
    return entries


def _is_run_dir(text: str) -> bool:
    folder = Path(text)
    if folder.suffix in (".yaml", ".yml") and folder.is_file():
        raise ConfigError(f"{text} is a config file; give a run, or train it: everstep train {text}")
    if not is_run(folder) and folder.is_dir() and os.sep in text:
        raise ConfigError(f"{text} is not a run directory: it has no run.json; give a run directory")
    return is_run(folder)
