"""Files of a run directory that anybody may have sent: what is read of them is checked before it is trusted.

Only regular files are opened, without waiting: a FIFO has no end, a device may do something.  Only so much
is read as is there, and no more than is meant to be.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from io import FileIO
from typing import Any

LARGEST_NOTE = 1 << 20
"""Bytes of a file that says something of a run: `run.json`, `lock.json`, `checkpoint`, `pins.json`."""

LARGEST_HOLE = 64 << 20
"""Bytes of a file that are not on the disk: those of a crash are few."""


def open_regular(path: str | os.PathLike[str]) -> FileIO:
    """Open a regular file for reading.

    Raises:
        OSError: it is none, or cannot be read.
    """
    _require_regular(os.stat(path), path)
    file = FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    try:
        _require_regular(os.fstat(file.fileno()), path)  # what has the name now
    except OSError:
        file.close()
        raise
    return file


def _require_regular(found: os.stat_result, path: str | os.PathLike[str]) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder", os.fspath(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", os.fspath(path))


def read_regular(path: str | os.PathLike[str], largest: int | None = None) -> bytes:
    """The bytes of a regular file.

    Args:
        largest: a larger one is an error.

    Raises:
        OSError: it is none, cannot be read, or is too large.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if largest is not None and size > largest:
            raise OSError(errno.EFBIG, f"has {size:,} bytes, {largest:,} are allowed", str(path))
        return file.read()


def require_no_hole(file: FileIO) -> None:
    """Refuse a file that claims bytes which are not on the disk, and would be in memory.

    Raises:
        OSError: there are more than `LARGEST_HOLE` of them in one place.
    """
    size = os.fstat(file.fileno()).st_size
    at = 0
    while size > LARGEST_HOLE and at < size:
        hole = os.lseek(file.fileno(), at, os.SEEK_HOLE)
        at = _next_data(file, hole, size) if hole < size else size
        if at - hole > LARGEST_HOLE:
            raise OSError(errno.EINVAL, f"has a hole of {at - hole:,} bytes", str(file.name))


def _next_data(file: FileIO, hole: int, size: int) -> int:
    try:
        return os.lseek(file.fileno(), hole, os.SEEK_DATA)
    except OSError:  # it goes to the end
        return size


def parse_json(text: bytes | bytearray | memoryview | str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none, or nested too deeply to be read.
    """
    try:
        return json.loads(text if isinstance(text, str) else bytes(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_note(path: str | os.PathLike[str]) -> Any:
    """The value of a small JSON file.

    Raises:
        OSError: not a regular file, cannot be read, or is larger than `LARGEST_NOTE`.
        ValueError: not JSON.
    """
    return parse_json(read_regular(path, LARGEST_NOTE))
