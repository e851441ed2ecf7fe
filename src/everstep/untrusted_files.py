"""Careful reading of files that may come from anybody, such as a run directory that somebody has sent.

Only regular files are opened, without waiting: a FIFO has no end, and a device may act when it is opened.
Size and holes can be checked before a file is read into memory.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from io import FileIO
from typing import Any

LARGEST_NOTE = 1 << 20
"""Most bytes of a file with facts about a run: `run.json`, `lock.json`, `checkpoint`, `pins.json`."""

LARGEST_HOLE = 64 << 20
"""Most bytes of a hole, which are not on the disk: a crash leaves few."""


def open_regular(path: str | os.PathLike[str]) -> FileIO:
    """Open a regular file for reading.

    Raises:
        OSError: the file is not a regular file, or cannot be read.
    """
    _require_regular(os.stat(path), path)
    file = FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    try:
        # Checked again: another file may have got the name since the first check.
        _require_regular(os.fstat(file.fileno()), path)
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
    """Read the bytes of a regular file.

    Args:
        largest: most bytes that the file may have; None for no limit.

    Raises:
        OSError: the file is not a regular file, cannot be read, or is too large.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if largest is not None and size > largest:
            raise OSError(errno.EFBIG, f"has {size:,} bytes, {largest:,} are allowed", str(path))
        return file.read()


def require_no_hole(file: FileIO) -> None:
    """Refuse a file with a large hole: its bytes are not on the disk, but would fill the memory.

    Raises:
        OSError: a hole has more than `LARGEST_HOLE` bytes.
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
    except OSError:  # the hole goes to the end of the file
        return size


def parse_json(text: bytes | bytearray | memoryview | str) -> Any:
    """Parse a JSON string.

    Raises:
        ValueError: the string is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text if isinstance(text, str) else bytes(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_note(path: str | os.PathLike[str]) -> Any:
    """Read a small JSON file.

    Raises:
        OSError: the file is not a regular file, cannot be read, or is larger than `LARGEST_NOTE`.
        ValueError: the file is not JSON.
    """
    return parse_json(read_regular(path, LARGEST_NOTE))
