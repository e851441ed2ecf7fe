"""Removal of a run directory, and of nothing else."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from everstep import hazard
from everstep.durable import fsync_folder, rename
from everstep.errors import RunDirError
from everstep.record.journal_reader import RunJournal
from everstep.record.lock import RunLock, is_held
from everstep.record.rundir import RunDir


def why_stays(run_dir: Path, run: str) -> str:
    """Say why a directory must not be removed; "" if it may be."""
    if run_dir.is_symlink():
        return "it is a link; remove the run that it points to"
    try:
        there = RunDir.open(run_dir, create=False).id
        if there != run:
            return f"another run is there, {there}"
        if is_held(run_dir):
            return "it is running"
        if _may_run(run_dir):
            return (
                "it was started without a lock and did not say how it ended: it may be running; if you know "
                "that it is not, delete the directory by hand"
            )
    except OSError as error:
        return str(error)
    if inner := _other_run(run_dir):
        return f"it contains another run, {inner}"
    return ""


def _may_run(run_dir: Path) -> bool:
    """Whether the newest start took no lock, and did not say how it ended."""
    newest = [segment for segment in RunJournal(run_dir).segments() if segment.started][-1:]
    said = {event.kind: event.data for start in newest for event in start.events}
    locked = said.get("segment", {}).get("facts", {}).get("lock", True) and (run_dir / "lock").exists()
    return not locked and "closed" not in said


def _other_run(run_dir: Path) -> Path | None:
    """Find a run inside a run."""
    for folder, _, names in os.walk(run_dir):
        if "run.json" in names and Path(folder) != run_dir:
            return Path(folder)
    return None


def remove(run_dir: Path, run: str) -> None:
    """Remove the directory of the run with the id `run`, and of no other.

    The directory gets another name first, so that a start at its old place begins a new run.  After a kill
    in between, the rest is still a run directory, and can be removed.
    """
    if why := why_stays(run_dir, run):
        raise RunDirError(f"{run_dir} stays: {why}")
    moved = run_dir.with_name(f"{run_dir.name}.removed-{secrets.token_hex(3)}")
    lock, place = RunLock(run_dir), run_dir
    lock.acquire()
    try:
        if (there := RunDir.open(run_dir, create=False).id) != run:  # replaced since why_stays looked
            raise RunDirError(f"{run_dir} stays: another run is there, {there}")
        rename(run_dir, moved, "removing")
        lock.moved()
        place = moved
        fsync_folder(moved.parent, "removing")
        _empty(moved)
    except RunDirError:
        raise
    except OSError as error:
        why = f"the run cannot be removed wholly: {error.strerror}; check the disk, and remove the rest"
        raise RunDirError(error.errno, why, str(place)) from error
    finally:
        lock.release()


def _empty(folder: Path) -> None:
    """Empty and remove a run's folder; the files by which it can be removed again come last."""
    rank = {"run.json": 1, "lock": 2}
    for entry in sorted(folder.iterdir(), key=lambda entry: rank.get(entry.name, 0)):
        hazard.reach("removing.entry")
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    folder.rmdir()
