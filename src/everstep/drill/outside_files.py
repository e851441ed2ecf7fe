"""Files that a script writes outside its run directories: they are named, and never touched."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from everstep.record.trust import key_file

MOST_ENTRIES = 50_000
"""Number of files of a folder that are looked at."""
_NOT_FILES = ("/proc/", "/sys/")
_PYTHONS_OWN = "__pycache__"

Listing: TypeAlias = dict[str, tuple[int, int, int]]
"""Path -> inode, size in bytes, time of the last change in nanoseconds."""


def listing(folders: Iterable[Path], drill: Path) -> Listing:
    """List the files below some folders; left out are hidden folders, virtual environments and the drill's.

    Besides what Python notes (`everstep.drilled.note_files`) this finds what a library in C, or a child that
    is not Python, writes into one of the folders; and what another program writes there meanwhile.  So the
    folders that all programs share, of temporary files and the home, are left out.
    """
    found: Listing = {}
    shared = {Path(tempfile.gettempdir()).resolve(), Path.home().resolve()}
    shared |= {folder for each in shared for folder in each.parents}
    for folder in set(folders) - shared:
        for path in islice(_files(folder, drill), MOST_ENTRIES):
            with suppress(OSError):  # it was deleted meanwhile
                seen = os.lstat(path)
                found[path] = (seen.st_ino, seen.st_size, seen.st_mtime_ns)
    return found


def changed(before: Listing, after: Listing) -> set[str]:
    """Return the paths that are new, or are not what they were."""
    return {path for path, seen in after.items() if before.get(path) != seen}


def outside(paths: Iterable[str], drill: Path) -> list[str]:
    """Return those paths that are files outside the drill's folder; relative if below the current one."""
    here = os.getcwd() + os.sep
    found = {
        path.removeprefix(here)
        for path in map(os.path.normpath, paths)
        if path != str(key_file())  # everstep's own
        and not path.startswith((*_NOT_FILES, f"{drill}{os.sep}"))
        and _PYTHONS_OWN not in path
        and os.path.isfile(path)
    }
    return sorted(found)


def _files(folder: Path, drill: Path) -> Iterator[str]:
    for at, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not name.startswith((".", _PYTHONS_OWN))
            and not os.path.exists(os.path.join(at, name, "pyvenv.cfg"))
            and os.path.join(at, name) != str(drill)
        ]
        yield from (os.path.join(at, name) for name in files)
