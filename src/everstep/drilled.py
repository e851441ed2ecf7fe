"""What a drill tells the processes that it starts, through their environment.

| variable | meaning |
|---|---|
| EVERSTEP_DRILL | file that a witness of each run writes, see `everstep.services.witness` |
| EVERSTEP_DRILL_FILES | file for the paths of the files that the process writes |
| EVERSTEP_DRILL_SEED | seed of a run that was given none |
| EVERSTEP_DRILL_LIMIT | steps after which a run is left, see `everstep.services.witness` |
"""

from __future__ import annotations

import os
import sys
from typing import Any, TypeVar

FILES, SEED, LIMIT = "EVERSTEP_DRILL_FILES", "EVERSTEP_DRILL_SEED", "EVERSTEP_DRILL_LIMIT"

S = TypeVar("S")

MOST_FILES = 10_000
"""Number of paths after which no more are noted."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_WRITTEN = {"os.rename": 1, "os.link": 1, "os.symlink": 1, "os.remove": 0, "sqlite3.connect": 0}
"""Audit event -> which of its arguments is the path that is written."""


def seed_or_drilled(seed: S) -> S | int:
    """Return a `seed=` argument; where none was given the drill's, so that two programs are comparable."""
    said = os.environ.get(SEED)
    return int(said) if seed is None and said else seed


def note_files() -> None:
    """Note from now on the files that this process writes, if a drill wants that; called on import.

    Seen are the files that Python opens.  What a library in C, or a child that is not Python, opens is not.
    """
    path = os.environ.get(FILES)
    if path:
        sys.addaudithook(_FileNotes(path))


def append_line(path: str, line: bytes) -> None:
    """Append a line by a single write, which survives SIGKILL and which no second process can tear."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(descriptor, line + b"\n")
    finally:
        os.close(descriptor)


class _FileNotes:
    def __init__(self, path: str) -> None:
        self._path = path
        self._seen = {path}

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        written = args[0] if event == "open" and _writes(args) else None
        if event in _WRITTEN:
            written = args[_WRITTEN[event]]
        if isinstance(written, str | bytes | os.PathLike):
            self._note(os.path.abspath(os.fsdecode(written)))

    def _note(self, path: str) -> None:
        if path not in self._seen and len(self._seen) <= MOST_FILES:
            self._seen.add(path)
            append_line(self._path, os.fsencode(path))


def _writes(args: tuple[Any, ...]) -> bool:
    """Whether the arguments of the event "open" are those of an opening for writing."""
    return isinstance(args[2], int) and bool(args[2] & _WRITING)
