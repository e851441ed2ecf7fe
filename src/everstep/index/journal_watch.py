"""Shipping of journals as they grow, for a reader that stays: a training ships to a file twice a minute."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from everstep.durable import TMP
from everstep.errors import RunDirError
from everstep.index.admission import refusal
from everstep.index.database import Database
from everstep.index.readers import is_run
from everstep.index.shipping import (
    EVALUATIONS,
    Shipped,
    is_gone,
    is_here,
    journal_sizes,
    parts_of,
    ship_noting,
)
from everstep.record import is_held
from everstep.record.segment_file import newest_segment

_HEARTBEAT = 30
"""Seconds after which a run that counts as running is looked at though its journal is silent."""


class JournalWatch:
    """Watch over the run directories of this machine.  It writes the index, never a run.

    Args:
        folders: run directories, or folders that hold run directories; runs in them are found as they begin.

    Attributes:
        gone: keys of the runs whose directories do not exist any more, after the newest look.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = [folder.absolute() for folder in folders]
        self.gone: set[int] = set()
        self._compared: dict[int, object] = {}
        """Run -> mark of its path when the run was looked for there; another may be there now."""
        self._newest: dict[str, tuple[int, str]] = {}
        """Journal's folder -> the time at which it changed last, and its newest file."""
        # Taken before the index is brought up to date: what changes after that is then seen as a change.
        self._marks: dict[str, object] = {path: self._mark(path, False) for path in self._entries()}

    def look(self, database: Database, runs: Iterable[Mapping[str, Any]]) -> list[str]:
        """Ship every run that has changed since the last look; return descriptions of faults.

        Args:
            runs: the runs of the index, with the keys id, name, path, host, status, created and seed.

        Raises:
            RunIndexError: the index cannot be written.
        """
        here = _by_path(database, runs)
        return self._look_at(database, here, dict.fromkeys([*here, *self._entries()]))

    def glance(self, database: Database, runs: Iterable[Mapping[str, Any]]) -> list[str]:
        """Look at some runs alone, as `look` does."""
        here = _by_path(database, runs)
        return self._look_at(database, here, here)

    def _look_at(
        self, database: Database, here: Mapping[str, list[Mapping[str, Any]]], paths: Iterable[str]
    ) -> list[str]:
        total = Shipped()
        origins = {run["name"]: (run["created"], run["seed"]) for there in here.values() for run in there}
        for path in paths:
            there = here.get(path, [])
            mark = self._mark(path, any(run["status"] == "running" for run in there))
            changed = mark != self._marks.get(path)
            for run in there:
                self._note_whether_gone(database, run, mark)
            if changed and is_run(path):
                said = refusal(database, origins, Path(path), inside=self._has_inside(path))
                total.problems += [said] if said else []
                for part in parts_of(Path(path)) if said is None else ():
                    ship_noting(total, database, part)
            self._marks[path] = mark  # after the shipping: where this fails, the next look tries again
        return total.problems

    def _note_whether_gone(self, database: Database, run: Mapping[str, Any], mark: object) -> None:
        """Note whether a run's directory is gone, if the mark of its path says that this may have changed."""
        key = run["id"]
        if mark is None or key in self.gone or self._compared.get(key) != mark:
            (self.gone.add if is_gone(database, run) else self.gone.discard)(key)
            self._compared[key] = mark

    def _mark(self, path: str, running: bool) -> object:
        """Return what differs after a change of a run directory; None if there is none."""
        try:
            changed = os.stat(path).st_mtime_ns  # by a label, too
            if running:
                beat = int(time.time()) // _HEARTBEAT
                return changed, beat, tuple(sorted(journal_sizes(Path(path)).items())), _is_held(path)
            return changed, *self._end_of(f"{path}/journal")
        except (OSError, RunDirError):
            return None

    def _end_of(self, journal: str) -> tuple[int, ...]:
        """Return what differs after a change of a journal; the start of a process fills its file later."""
        changed = os.stat(journal).st_mtime_ns
        at, newest = self._newest.get(journal, (0, ""))
        if at != changed:
            newest = newest_segment(journal)
            self._newest[journal] = changed, newest
        found = os.stat(newest) if newest else None
        return (changed,) if found is None else (changed, found.st_mtime_ns, found.st_size)

    def _has_inside(self, path: str) -> bool:
        return any(folder in (Path(path), Path(path).parent) for folder in self._folders)

    def _entries(self) -> list[str]:
        """List the folders in which a run may lie."""
        found: list[str] = []
        for folder in self._folders:
            if is_run(folder):
                found.append(str(folder))
            try:
                with os.scandir(folder) as entries:
                    found += [e.path for e in entries if not e.name.startswith(TMP) and e.is_dir()]
                    # Of a run directory its evaluations are a part, which is shipped with it.
                    part = f"{folder}/{EVALUATIONS}" if is_run(folder) else None
                    found = [path for path in found if path != part]
            except OSError:
                continue  # the folder is gone, and its runs are noted as gone
        return found


def _by_path(database: Database, runs: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Map the paths of this machine's runs to the runs: in place of a deleted run another may be."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        if is_here(database, run["host"]):
            found.setdefault(run["path"], []).append(run)
    return found


def _is_held(path: str) -> bool | None:
    try:
        return is_held(Path(path))
    except OSError:
        return None  # a file system without locks
