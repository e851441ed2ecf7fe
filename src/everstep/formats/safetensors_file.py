"""safetensors files of others: a header that says where each array lies, and one array's bytes at a time."""

from __future__ import annotations

import math
import os
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from everstep.checkpoint.array_file import ITEM_BYTES
from everstep.contracts.state import HostArray, Unread
from everstep.errors import CheckpointError
from everstep.untrusted_files import is_file_name, open_regular, parse_json

LARGEST_HEADER = 100_000_000
"""Most bytes of a header; the limit of the safetensors library."""


class _Span(NamedTuple):
    """Place of an array: its element type, shape, first byte in the file, and number of bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def is_safetensors(start: bytes) -> bool:
    """Whether a file that begins with these 9 bytes may be a safetensors file."""
    return len(start) > 8 and start[8:9] == b"{"


def open_file(path: Path) -> dict[str, Unread]:
    """List the arrays of a file by name, from its header; each is read when it is needed."""
    try:
        with open_regular(path) as file:
            spans = _spans(path, file)
    except OSError as error:
        unreadable(path, error)
    return {
        name: Unread(span.dtype, span.shape, partial(_read, path, name, span)) for name, span in spans.items()
    }


def _spans(path: Path, file: FileIO) -> dict[str, _Span]:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, LARGEST_HEADER):
        refuse(path, f"is damaged: its header would have {length:,} bytes, and the file has {size:,}")
    try:
        entries = parse_json(file.read(length), once=True)
        entries.pop("__metadata__", None)
        spans = {name: _span(about, 8 + length) for name, about in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        refuse(path, f"is damaged: its header cannot be understood ({type(error).__name__}: {error})", error)
    end = 8 + length
    for name, span in sorted(spans.items(), key=lambda item: (item[1].start, item[1].size)):
        if span.start != end:
            refuse(path, f"is damaged: array {name!r} begins at byte {span.start:,} in place of {end:,}")
        end += span.size
    if end != size:
        refuse(path, f"is damaged: its arrays end at byte {end:,}, and the file has {size:,}")
    return spans


def _span(about: dict[str, Any], data: int) -> _Span:
    """Check what a header says of an array."""
    dtype, shape, (start, end) = about["dtype"], tuple(about["shape"]), about["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError(f"{about!r:.200} has other numbers than sizes")
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{dtype!r:.50} is not a known element type: {', '.join(ITEM_BYTES)}")
    if math.prod(shape) * ITEM_BYTES[dtype] != end - start:
        raise ValueError(f"{dtype} {shape!r:.200} does not fit {end - start:,} bytes")
    return _Span(dtype, shape, data + start, end - start)


def _read(path: Path, name: str, span: _Span) -> HostArray:
    data = np.empty(span.size, np.uint8)
    try:
        with open_regular(path) as file:
            file.seek(span.start)
            rest = memoryview(data.data)
            while rest:
                count = file.readinto(rest)
                if not count:
                    refuse(path, f"ended early while array {name!r} was read")
                rest = rest[count:]
    except OSError as error:
        unreadable(path, error)
    return HostArray(span.dtype, span.shape, data, "")


def refuse(
    path: Path, how: str, cause: Exception | None = None, remedy: str = "give another copy of it"
) -> NoReturn:
    """Raise the error of a file of weights that cannot be read."""
    raise CheckpointError(f"{path} {how}; {remedy}") from cause


def unreadable(path: Path, error: OSError) -> NoReturn:
    """Raise the error of a file that is missing or cannot be read."""
    refuse(
        path,
        "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})",
        error,
    )


def inside(folder: Path, name: object, whose: Path) -> Path:
    """Return the path of a file of a folder; `whose` is the file that names it."""
    if not is_file_name(name):
        refuse(whose, f"names the file {name!r:.200}, which is not a name in its folder and is not followed")
    return folder / name
