"""Watch over runs: while somebody looks at a run, its training hands each row to the journal's file at once.

Whoever looks holds a shared lock on the newest file of the journal.  Such a lock changes no file, needs no
right to write, hinders no training, and is gone when its holder is, however that ends.  The training asks
once a second whether there is such a lock (`Journal.is_watched`).

The lock is on a single byte far beyond the file's end.  On an SMB share Linux makes any lock mandatory: a
`flock`, which covers all bytes, would fail each write of the training, and with it the next checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterable

from everstep.record.lock import is_taken, packed_lock
from everstep.record.segment_file import newest_segment

_PLACE = 1 << 62
"""Offset of the byte that is locked."""


class Watch:
    """Locks of the runs that somebody looks at; used by one thread."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}
        """Run directory -> descriptor of its newest file."""

    def over(self, run_dirs: Iterable[str]) -> None:
        """Watch these runs, and no others; called again and again, since a new start makes a new file."""
        newest = {run_dir: _newest(run_dir) for run_dir in run_dirs}
        for run_dir, descriptor in list(self._held.items()):
            if not _is_at(descriptor, newest.get(run_dir, "")):
                self._release(run_dir)
        for run_dir in newest.keys() - self._held.keys():
            with contextlib.suppress(OSError):  # no lock, or the training is just asking: the next call tries
                self._hold(run_dir, newest[run_dir])

    def close(self) -> None:
        """Watch nothing more."""
        for run_dir in list(self._held):
            self._release(run_dir)

    def _hold(self, run_dir: str, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            _set(descriptor, fcntl.F_RDLCK)
        except BaseException:
            os.close(descriptor)
            raise
        self._held[run_dir] = descriptor

    def _release(self, run_dir: str) -> None:
        descriptor = self._held.pop(run_dir)
        with contextlib.suppress(OSError):
            # A forked loader worker has the descriptor, too: a close alone would leave it the lock.
            _set(descriptor, fcntl.F_UNLCK)
        os.close(descriptor)


def is_watched(descriptor: int) -> bool:
    """Whether somebody else holds the lock of a journal's file; False where the file system has no locks."""
    try:
        if sys.platform == "linux":
            return is_taken(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _byte(fcntl.F_WRLCK)))
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _set(descriptor: int, kind: int) -> None:
    if sys.platform == "linux":
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _byte(kind))
    else:  # Python knows no lock of an open file on some bytes there
        fcntl.flock(descriptor, fcntl.LOCK_UN if kind == fcntl.F_UNLCK else fcntl.LOCK_SH | fcntl.LOCK_NB)


def _byte(kind: int) -> bytes:
    return packed_lock(kind, _PLACE, 1)


def _is_at(descriptor: int, path: str) -> bool:
    """Whether a file is the one at a path: a journal that was moved away is written again under its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False


def _newest(run_dir: str) -> str:
    """Return the path of the newest file of a run's journal; "" if there is none, or no folder."""
    try:
        return newest_segment(os.path.join(run_dir, "journal"))
    except OSError:
        return ""
