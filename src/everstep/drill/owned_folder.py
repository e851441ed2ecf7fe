"""Temporary folders that belong to a process: what a killed one has left is cleared by the next."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def owned_folder(prefix: str) -> Iterator[Path]:
    """Make a temporary folder, deleted after the block; first delete those of dead owners with this prefix.

    The owner holds a lock on the folder, which the kernel drops with the process.
    """
    _clear(prefix)
    folder, lock = _made(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _made(prefix: str) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix)).resolve()
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # it was taken for that of a dead owner at once
        with suppress(OSError):  # a file system without locks: then nobody clears it, either
            fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(folder), os.fstat(lock)):
                return folder, lock
        os.close(lock)  # the same, before it was locked


def _clear(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # not a folder, another user's, or its owner lives
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
