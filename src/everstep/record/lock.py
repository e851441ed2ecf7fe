"""Lock of a run directory: held by one process, and by one loop in the process.  Removal of a run under it.

The lock is `fcntl.lockf` on the file `lock`: the kernel drops the lock when its process dies, however it
dies, and a forked loader worker neither holds the lock nor can drop it.  But the lock also falls with *any*
close of that file in the holding process, so the holder never reads, reopens or deletes the file: the
holder's name is in `lock.json`, and a second loop in the same process is found in a registry instead.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import secrets
import shutil
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from everstep import hazard
from everstep.durable import fsync_folder, no_disk_error, rename, write_whole
from everstep.errors import JournalError, RunDirError, RunLockedError
from everstep.record.journal_reader import RunJournal
from everstep.record.rundir import RunDir
from everstep.untrusted_files import open_regular, read_note

_HELD: dict[tuple[int, int], int] = {}
"""(st_dev, st_ino) of each lock file held -> pid of the holder; a forked child is not the holder."""
_GUARD = threading.Lock()


class RunLock:
    """Lock of one run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._path = Path(run_dir) / "lock"
        self._note = Path(run_dir) / "lock.json"
        self._fd: int | None = None
        self._key = (0, 0)

    def acquire(self) -> str | None:
        """Take the lock, without waiting; return a sentence if the last holder died without releasing it."""
        with _GUARD:
            # before opening: closing the file again would drop the first loop's lock
            if _is_ours(self._path):
                raise RunLockedError(
                    f"{self._path.parent} is held by another loop of this process (pid {os.getpid()}); leave "
                    "its `with` block first, or give this loop another directory"
                )
            try:
                with no_disk_error("the run cannot be locked", self._path):
                    self._fd = self._open()
                    return self._announce()
            except RunDirError as error:
                self._drop()
                if error.errno == errno.ENOENT:
                    raise self._removed_error() from None
                raise

    def release(self) -> None:
        """Give the lock back.  May be called twice; does nothing in a forked child."""
        with _GUARD:
            if self._fd is None or _HELD.get(self._key) != os.getpid():
                return
            with suppress(OSError):
                # else the directory was moved, and the note may be another process's
                if self._is_here(os.fstat(self._fd)):
                    hazard.reach("lock.unlink")
                    self._note.unlink(missing_ok=True)
            self._drop()  # after the note is gone: the next holder writes its own

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock for the length of a block."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def keep(self) -> None:
        """Take the lock again, which falls where its file is removed, or read by this process (a copy)."""
        with _GUARD:
            if self._fd is None:
                return
            descriptor, key = self._fd, self._key
            try:
                if self._is_here(os.fstat(descriptor)):
                    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # while it is held, does nothing
                    return
                self._fd = self._open(os.O_EXCL)
            except (FileExistsError, BlockingIOError):
                raise RunLockedError(
                    f"the lock {self._path} was removed, or read by this process (to copy the run?), and "
                    "another process has entered the run: this one saves no more; leave the run to it"
                ) from None
            os.close(descriptor)
            _HELD.pop(key, None)
            self._announce()

    def _open(self, exclusive: int = 0) -> int:
        hazard.reach("lock.open")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | exclusive
        descriptor = os.open(self._path, flags, 0o666)
        try:
            hazard.reach("lock.lock")
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Only now: a directory that was replaced before the lock was taken is another run's.
            status = os.fstat(descriptor)
            if not self._is_here(status):
                raise self._removed_error()
        except RunDirError:
            os.close(descriptor)
            raise
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                holder = self._holder() or "another process (it has not written its name yet)"
                advice = "wait for it or stop it, or give another directory"
                raise RunLockedError(f"{self._path.parent} is in use by {holder}; {advice}") from None
            raise RunDirError(
                f"{self._path.parent} is on a file system without locks ({error.strerror}); use another "
                "directory, or pass lock=False and make sure yourself that only one process uses the run"
            ) from error
        self._key = (status.st_dev, status.st_ino)
        _HELD[self._key] = os.getpid()
        return descriptor

    def _is_here(self, status: os.stat_result) -> bool:
        """Whether the open file still has the name: the directory may be another run's by now."""
        with suppress(FileNotFoundError):
            return os.path.samestat(status, os.stat(self._path))
        return False

    def _removed_error(self) -> RunDirError:
        return RunDirError(
            f"{self._path.parent} was removed or replaced by another process while it was opened; start again"
        )

    def _announce(self) -> str | None:
        previous = self._holder()
        me = {"pid": os.getpid(), "host": platform.node(), "started": time.time()}
        write_whole(self._note, json.dumps(me).encode(), "lock.json")
        return previous and f"took over the run from {previous}, which ended without releasing it"

    def _drop(self) -> None:
        if self._fd is not None:
            _HELD.pop(self._key, None)
            os.close(self._fd)
            self._fd = None

    def _holder(self) -> str | None:
        """Describe the lock's holder, as its note does; None if there is none."""
        since, note = "", None
        try:
            note = read_note(self._note)  # anybody may have written it
            since = time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(float(note["started"])))
        except FileNotFoundError:
            return None
        except (KeyError, TypeError, ValueError, OverflowError, OSError):
            note = note if isinstance(note, dict) else {}
        return (
            f"process {note.get('pid', 'unknown')!s:.80} on host {note.get('host', 'unknown')!s:.80}{since}"
        )


def _is_ours(path: Path) -> bool:
    """Whether a loop of this process holds the lock at a path."""
    with suppress(FileNotFoundError):
        status = os.stat(path)
        return _HELD.get((status.st_dev, status.st_ino)) == os.getpid()
    return False


def is_held(run_dir: Path) -> bool:
    """Whether a live process holds the run, without taking the lock; OSError: there are no locks here."""
    path = run_dir / "lock"
    if _is_ours(path):
        return True  # without opening the file: closing it again would drop the lock
    # a `struct flock` on the whole file
    if sys.platform == "darwin":
        layout, fields, at = "qqihh", (0, 0, 0, fcntl.F_WRLCK, os.SEEK_SET), 20
    else:
        layout, fields, at = "hhqqi4x", (fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0), 0
    try:
        with open_regular(path) as file:
            result = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(layout, *fields))
    except FileNotFoundError:
        return False
    return bool(struct.unpack_from("h", result, at)[0] != fcntl.F_UNLCK)


def why_stays(run_dir: Path, run: str) -> str:
    """Say why a directory must not be removed; "" if it may be."""
    if run_dir.is_symlink():
        return "it is a link; remove the run that it points to"
    try:
        if (present := RunDir.open(run_dir, create=False).id) != run:
            return f"another run is there, {present}"
        if is_held(run_dir):
            return "it is running"
        journal = RunJournal(run_dir)
        has_lock = journal.facts().get("lock", True) and (run_dir / "lock").exists()
        newest = [segment for segment in journal.segments() if segment.started][-1:]
        if not has_lock and not any(each.kind == "closed" for start in newest for each in start.events):
            return (
                "it was started without a lock and did not say how it ended: it may be running; if you know "
                "that it is not, delete the directory by hand"
            )
    except (OSError, JournalError) as error:
        return str(error)
    inner = [path for path, _, names in os.walk(run_dir) if "run.json" in names and Path(path) != run_dir]
    return f"it contains another run, {inner[0]}" if inner else ""


def remove(run_dir: Path, run: str) -> None:
    """Remove the directory of the run with the id `run`, and of no other.

    The directory gets another name first, so that a start at its old place begins a new run.  After a kill
    in between, the rest is still a run directory, and can be removed.
    """
    if reason := why_stays(run_dir, run):
        raise RunDirError(f"{run_dir} stays: {reason}")
    trash = run_dir.with_name(f"{run_dir.name}.removed-{secrets.token_hex(3)}")
    lock = RunLock(run_dir)
    with lock.held(), no_disk_error("the run cannot be removed wholly", trash):
        if (present := RunDir.open(run_dir, create=False).id) != run:  # replaced since why_stays looked
            raise RunDirError(f"{run_dir} stays: another run is there, {present}")
        rename(run_dir, trash, "removing")
        lock.release()
        fsync_folder(trash.parent, "removing")
        # the files by which it can be removed again come last
        order = {"run.json": 1, "lock": 2}
        for entry in sorted(trash.iterdir(), key=lambda entry: order.get(entry.name, 0)):
            hazard.reach("removing.entry")
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        trash.rmdir()
