"""Copy of a state on disk, for a run that keeps no second copy in memory (`Checkpoints(copy=False)`)."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from io import FileIO
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from everstep.contracts.state import HostArray, LazyArray
from everstep.hazard import reach
from everstep.state import Encoded, content_digest


class Spill:
    """File without a name in the run directory: whatever ends the process, nothing is left of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: FileIO | None = None

    def keep(self, encoded: Encoded) -> Encoded:
        """Write the arrays to disk; returns the same tree, with arrays that are read back one at a time.

        The tree that was kept before is gone.
        """
        self.close()
        self._file = file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
        return replace(encoded, arrays=dict(_written(file, encoded.arrays)))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _written(file: FileIO, arrays: Mapping[str, HostArray]) -> Iterator[tuple[str, HostArray]]:
    at = 0
    for name, array in arrays.items():
        digest = content_digest(array)
        reach("checkpoint.spill")
        rest = array.data.data
        while rest:
            rest = rest[file.write(rest) :]
        yield name, _stored(file, at, array, digest)
        at += array.nbytes


def _stored(file: FileIO, at: int, array: HostArray, digest: str) -> HostArray:
    size = array.nbytes

    def fetch() -> NDArray[np.uint8]:
        data = np.empty(size, np.uint8)
        done = 0
        while done < size and (count := os.preadv(file.fileno(), [data.data[done:]], at + done)):
            done += count
        if xxhash.xxh3_128_hexdigest(data.data) != digest:
            raise OSError(errno.EIO, "the state that was kept on disk has changed there")
        return data

    return LazyArray(array.dtype, array.shape, array.backend, array.extra, array.region, size, fetch, digest)
