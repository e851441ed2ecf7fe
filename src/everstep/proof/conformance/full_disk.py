"""A disk that becomes full while a program runs: a small tmpfs, else a limit on the size of files."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from everstep.proof.conformance.starts import Running

TMPFS, LIMIT = "tmpfs", "RLIMIT_FSIZE"

LEAST = 64 * 1024
"""Bytes that a file may have under the limit, at least: the witness and the output write into one, too."""


class FullDisk:
    """Room for a run that can be taken away.

    Attributes:
        folder: where the run goes.
        how: `TMPFS` or `LIMIT`.
        largest: bytes that a file may have under the limit.
    """

    def __init__(self, folder: Path, how: str, largest: int) -> None:
        self.folder, self.how, self.largest = folder, how, largest
        self._filler = folder / "filler"

    def fill(self, running: Running) -> None:
        """Leave no byte."""
        if self.how == LIMIT:
            with suppress(ProcessLookupError):
                resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (self.largest, self.largest))
            return
        descriptor = os.open(self._filler, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            for size in (2**20, 4096):
                with suppress_full():
                    while True:
                        os.write(descriptor, bytes(size))
        finally:
            os.close(descriptor)

    def free(self) -> None:
        """Give the space back."""
        self._filler.unlink(missing_ok=True)


@contextmanager
def suppress_full() -> Iterator[None]:
    """Pass over ENOSPC."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


@contextmanager
def small_disk(folder: Path, size: int, largest: int) -> Iterator[FullDisk]:
    """Mount a tmpfs of `size` bytes; where that is not allowed, limit files to `largest` bytes instead."""
    folder.mkdir(parents=True)
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={size}", "everstep-conformance", str(folder)]
    try:
        is_mounted = subprocess.run(mounting, capture_output=True).returncode == 0
    except FileNotFoundError:
        is_mounted = False
    try:
        yield FullDisk(folder, TMPFS if is_mounted else LIMIT, largest)
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)
