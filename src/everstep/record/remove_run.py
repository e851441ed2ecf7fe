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
from everstep.record.rundir import RunDir, no_disk_error


def why_stays(run_dir: Path, run: str) -> str:
    """Say why a directory must not be removed; "" if it may be."""
    if run_dir.is_symlink():
        return "it is a link; remove the run that it points to"
    try:
        if (there := RunDir.open(run_dir, create=False).id) != run:
            return f"another run is there, {there}"
        if is_held(run_dir):
            return "it is running"
        newest = [segment for segment in RunJournal(run_dir).segments() if segment.started][-1:]
        events = {event.kind: event.data for start in newest for event in start.events}
        has_lock = (
            events.get("segment", {}).get("facts", {}).get("lock", True) and (run_dir / "lock").exists()
        )
        if not has_lock and "closed" not in events:
            return (
                "it was started without a lock and did not say how it ended: it may be running; if you know "
                "that it is not, delete the directory by hand"
            )
    except OSError as error:
        return str(error)
    inner = [path for path, _, names in os.walk(run_dir) if "run.json" in names and Path(path) != run_dir]
    return f"it contains another run, {inner[0]}" if inner else ""


def remove(run_dir: Path, run: str) -> None:
    """Remove the directory of the run with the id `run`, and of no other.

    The directory gets another name first, so that a start at its old place begins a new run.  After a kill
    in between, the rest is still a run directory, and can be removed.
    """
    if why := why_stays(run_dir, run):
        raise RunDirError(f"{run_dir} stays: {why}")
    moved = run_dir.with_name(f"{run_dir.name}.removed-{secrets.token_hex(3)}")
    lock = RunLock(run_dir)
    with lock.held(), no_disk_error("the run cannot be removed wholly", moved):
        if (there := RunDir.open(run_dir, create=False).id) != run:  # replaced since why_stays looked
            raise RunDirError(f"{run_dir} stays: another run is there, {there}")
        rename(run_dir, moved, "removing")
        lock.moved()
        fsync_folder(moved.parent, "removing")
        # the files by which it can be removed again come last
        last = {"run.json": 1, "lock": 2}
        for entry in sorted(moved.iterdir(), key=lambda entry: last.get(entry.name, 0)):
            hazard.reach("removing.entry")
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        moved.rmdir()
