"""Careful reading of files that may come from anybody, such as a run directory that somebody has sent.

Only regular files are opened, without waiting: a FIFO has no end, and a device may act when it is opened.
Size and holes can be checked before a file is read into memory.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, Literal, NewType, TypeGuard, get_args, get_origin

LARGEST_NOTE = 1 << 20
"""Most bytes of a file with facts about a run, such as `run.json`, `lock.json` and `labels.json`."""

LONGEST_ID = 1000
"""Most characters of a run's id, which stands in each message about the run; those of everstep have 300."""

LARGEST_HOLE = 1 << 20
"""Bytes of all holes of a file, which are not on the disk, that are read anyway: a crash leaves few."""

_SPARSEST = 4
"""Bytes of holes beyond these for each byte on the disk: a copy may have left out zeros."""


def open_regular(path: str | os.PathLike[str]) -> FileIO:
    """Open a regular file for reading."""
    try:
        _require_regular(os.stat(path), path)
    except ValueError as error:  # a NUL, or half a character
        raise OSError(errno.EINVAL, "is not a name of a file", os.fspath(path)) from error
    return _opened(FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)), path)


def _opened(file: FileIO, path: str | os.PathLike[str]) -> FileIO:
    """Check again: another file may have got the name since the first check."""
    try:
        _require_regular(os.fstat(file.fileno()), path)
    except OSError:
        file.close()
        raise
    return file


def open_below(top: str | os.PathLike[str], parts: Sequence[str]) -> FileIO:
    """Open a regular file below a folder for reading, through no link; each part in the one before."""
    folder = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = below
        _require_regular(os.stat(parts[-1], dir_fd=folder, follow_symlinks=False), parts[-1])
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return _opened(FileIO(os.open(parts[-1], flags, dir_fd=folder)), parts[-1])
    finally:
        os.close(folder)


def _require_regular(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder", os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", os.fspath(path))


def read_regular(path: str | os.PathLike[str], largest: int | None = None) -> bytes:
    """Read the bytes of a regular file, which may have `largest`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if largest is not None and size > largest:
            raise OSError(errno.EFBIG, f"has {size:,} bytes, {largest:,} are allowed", str(path))
        return file.read()


@contextmanager
def readable(path: Path, refuse: Callable[[Path, str, Exception], object]) -> Iterator[None]:
    """Refuse a file that the system does not let the block read: `refuse` gets the fault, and its cause."""
    try:
        yield
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        refuse(path, "is missing" if is_missing else f"cannot be read ({error.strerror})", error)


def require_no_hole(file: FileIO) -> None:
    """Refuse a file with large holes: their bytes are not on the disk, but would fill the memory."""
    size = os.fstat(file.fileno()).st_size
    at = holes = 0
    while size > LARGEST_HOLE and at < size:
        hole = os.lseek(file.fileno(), at, os.SEEK_HOLE)
        at = _next_data(file, hole, size) if hole < size else size
        holes += at - hole
        if holes > LARGEST_HOLE + _SPARSEST * (size - holes):
            raise OSError(errno.EINVAL, f"has holes of {holes:,} bytes or more", str(file.name))


def _next_data(file: FileIO, hole: int, size: int) -> int:
    try:
        return os.lseek(file.fileno(), hole, os.SEEK_DATA)
    except OSError:  # the hole goes to the end of the file
        return size


def parse_json(text: bytes | bytearray | memoryview | str, *, once: bool = False) -> Any:
    """Parse a JSON string; with `once`, a name that comes twice in one object is an error."""
    try:
        return json.loads(
            text if isinstance(text, str) else bytes(text), object_pairs_hook=_named_once if once else None
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the name {name!r:.200} comes twice")
        result[name] = value
    return result


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value is an integer from 0 to 2^63 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer of 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and -1 << 63 <= value < 1 << 63


Count = NewType("Count", int)
Finite = NewType("Finite", float)
Seconds = NewType("Seconds", float)
"""A time, or a span of at most 3,000 years."""

_TESTS: dict[Any, Callable[[Any], bool]] = {
    int: is_integer,
    float: lambda value: isinstance(value, float) or is_integer(value),
    Count: is_count,
    Finite: lambda value: fits(value, float) and math.isfinite(value),
    Seconds: lambda value: fits(value, float) and -1e11 < value < 1e11,
}


def fits(value: Any, shape: Any) -> bool:
    """Whether a JSON value has a shape: a type, a list of a shape, or shapes of fields by name.

    Types are classes, Literal, unions, list, tuple and dict of types, and those above.  An int has 64 bits.
    """
    if isinstance(shape, dict):
        return isinstance(value, dict) and not any(misfits(value, shape))
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(each, shape[0]) for each in value)
    if shape in _TESTS:
        return _TESTS[shape](value)
    if isinstance(shape, type):
        return isinstance(value, shape)
    kind, args = get_origin(shape), get_args(shape)
    if kind is list:
        return isinstance(value, list) and all(fits(each, args[0]) for each in value)
    if kind is tuple:
        return isinstance(value, list) and len(value) == len(args) and all(map(fits, value, args))
    if kind is dict:
        return isinstance(value, dict) and all(fits(each, args[1]) for each in value.values())
    return value in args if kind is Literal else any(fits(value, each) for each in args)


def misfits(values: Mapping[str, Any], shapes: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields that are missing, or of another shape; one whose name ends in "?" may be missing."""
    for field, shape in shapes.items():
        name = field.removesuffix("?")
        if not fits(values[name], shape) if name in values else name == field:
            yield name


def is_file_name(value: object) -> TypeGuard[str]:
    """Whether a value can be the name of a file in a folder: no path, nothing that the system refuses."""
    if not isinstance(value, str) or value in ("", ".", "..") or "/" in value or "\0" in value:
        return False
    try:
        os.fsencode(value)
    except UnicodeEncodeError:  # half of a character
        return False
    return True


def facts_checksum(facts: Mapping[str, Any]) -> str:
    """Compute the checksum (xxh3_64) that `run.json` has of its other facts."""
    import xxhash

    return xxhash.xxh3_64_hexdigest(json.dumps(facts, sort_keys=True).encode())


def read_note(path: str | os.PathLike[str]) -> Any:
    """Read a small JSON file."""
    return parse_json(read_regular(path, LARGEST_NOTE))
