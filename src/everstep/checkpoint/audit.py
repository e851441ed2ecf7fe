"""Slow reading of shared files while a run trains, so that damage is found before the next start.

Each save refers to shared files that an earlier save wrote.  If both copies of one of them rot on the disk,
no later checkpoint can be read.  So a save reads on where the save before has stopped, copy after copy, each
byte from the disk.

The cost is bounded by time, and a save reads at most `MOST`: what saves more often than every 128 s reads
equally much per second, and a run that saves each hour reads 256 MiB per hour.  `RATE` bytes per second are
less than 1 % of what a slow disk reads, and no more than 0.1 % of a core; with such frequent saves, 1 GiB in
two copies is read within 17 minutes.  Each tree has a rate of its own: what all ranks have in common, what
a rank has alone, and a rank's pieces of sharded arrays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import xxhash

from everstep.checkpoint.array_file import Record, check_digest, read_on
from everstep.errors import DamagedCheckpointError

RATE = 2 << 20
"""Bytes per second of a run that are read."""
MOST = 256 << 20
"""Most bytes that a save reads."""


class Audit:
    """Reading of the copies that the saves of one tree refer to.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last = clock, clock()
        self._path: Path | None = None
        """The copy that is being read, or was read last."""
        self._at, self._digest = 0, xxhash.xxh3_128()
        self._found: dict[Path, DamagedCheckpointError] = {}
        """What is wrong with each copy that was found damaged and not made again since."""

    def damaged(self, copies: Mapping[Path, Record]) -> dict[Path, DamagedCheckpointError]:
        """Read on in copies of shared files; returns those that are known to be damaged, with what is wrong.

        A copy is returned each time until `made_again` has been called: a full disk may prevent a repair.

        Args:
            copies: the record of each copy that is used now.
        """
        now = self._clock()
        left, self._last = min(MOST, int((now - self._last) * RATE)), now
        for path in self._from_here(copies):
            if left <= 0:
                break
            if path != self._path:
                self._path, self._at, self._digest = path, 0, xxhash.xxh3_128()
            count = min(left, copies[path]["bytes"] - self._at)
            left -= count
            try:
                self._read(path, count, copies[path])
            except DamagedCheckpointError as error:
                self._at, self._found[path] = copies[path]["bytes"], error
        return {path: self._found[path] for path in copies if path in self._found}

    def made_again(self, *copies: Path) -> None:
        """Note that copies are whole again."""
        for path in copies:
            self._found.pop(path, None)

    def is_damaged(self, path: Path) -> bool:
        """Whether a copy was found damaged, and not made again since."""
        return path in self._found

    def _from_here(self, copies: Mapping[Path, Record]) -> list[Path]:
        """Order copies for one round: what was begun comes first, what was read last comes last."""
        here = self._path
        if here is None or here not in copies:
            return sorted(copies, key=lambda path: (here is not None and path < here, path))
        read = self._at >= copies[here]["bytes"]
        return sorted(copies, key=lambda path: (path <= here if read else path < here, path))

    def _read(self, path: Path, count: int, record: Record) -> None:
        read_on(path, self._at, count, self._digest)
        self._at += count
        if self._at >= record["bytes"]:
            check_digest(path, self._digest, record)
