"""Faults of a disk: damage to the newest file of a run, and a disk that becomes full while a program runs."""

from __future__ import annotations

import errno
import os
import random
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from starts import Running, files

FLIPPED, TRUNCATED, ZEROED = (
    "newest file: a byte flipped",
    "newest file: truncated",
    "newest file: tail zeroed",
)
DAMAGES = (FLIPPED, TRUNCATED, ZEROED)

PAGE = 4096


def damage(run: Path, kind: str, rng: random.Random) -> tuple[Path, str]:
    """Damage the newest file that is nearly as large as the largest one; return it, and what was done.

    It is the bulk of the newest checkpoint, and no log that lies beside it.
    """
    found = files(run)
    least = 0.9 * max(size for size, _ in found.values())
    candidates = [(changed, path) for path, (size, changed) in found.items() if size >= least]
    path = Path(max(candidates)[1])
    content = bytearray(path.read_bytes())
    name = path.relative_to(run)
    if kind == FLIPPED:
        at = rng.randrange(len(content))
        content[at] ^= rng.randint(1, 255)
        plan = f"{name}: byte {at} of {len(content)} changed"
    elif kind == TRUNCATED:
        length = rng.randrange(len(content))
        plan = f"{name}: {length} of {len(content)} bytes left"
        del content[length:]
    else:
        at = (
            len(content) // 2
            if len(content) < 2 * PAGE
            else rng.randrange(1, len(content) // PAGE + 1) * PAGE
        )
        at = min(at, (len(content) - 1) // PAGE * PAGE) or len(content) // 2
        content[at:] = bytes(len(content) - at)
        plan = f"{name}: zeros from byte {at} of {len(content)} on"
    path.write_bytes(content)
    return path, plan


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
