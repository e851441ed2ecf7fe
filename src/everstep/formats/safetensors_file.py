"""safetensors files of others: a header that says where each array lies, and one array's bytes at a time."""

from __future__ import annotations

import math
import os
from functools import partial
from io import FileIO
from pathlib import Path
from typing import NoReturn

import numpy as np

from everstep.checkpoint.array_file import ITEM_BYTES, Span, parse_header
from everstep.contracts.state import HostArray, Unread
from everstep.errors import CheckpointError
from everstep.untrusted_files import is_file_name, open_regular

LARGEST_HEADER = 100_000_000
"""Most bytes of a header; the limit of the safetensors library."""


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


def _spans(path: Path, file: FileIO) -> dict[str, Span]:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, LARGEST_HEADER):
        refuse(path, f"is damaged: its header would have {length:,} bytes, and the file has {size:,}")
    try:
        spans, _ = parse_header(file.read(length), size - 8 - length)
        for span in spans.values():
            _require_known(span)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        refuse(path, f"is damaged: its header cannot be understood ({type(error).__name__}: {error})", error)
    data = 8 + length
    return {name: span._replace(start=data + span.start, end=data + span.end) for name, span in spans.items()}


def _require_known(span: Span) -> None:
    if not all(type(number) is int and number >= 0 for number in span.shape):
        raise ValueError(f"{span.shape!r:.200} has other numbers than sizes")
    if span.dtype not in ITEM_BYTES:
        raise ValueError(f"{span.dtype!r:.50} is not a known element type: {', '.join(ITEM_BYTES)}")
    if math.prod(span.shape) * ITEM_BYTES[span.dtype] != span.end - span.start:
        raise ValueError(f"{span.dtype} {span.shape!r:.200} does not fit {span.end - span.start:,} bytes")


def _read(path: Path, name: str, span: Span) -> HostArray:
    data = np.empty(span.end - span.start, np.uint8)
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
