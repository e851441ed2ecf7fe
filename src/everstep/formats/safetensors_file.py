"""safetensors files: those of others, read an array at a time; and shards with an index, as written here."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from functools import partial
from io import FileIO
from pathlib import Path
from typing import NoReturn

import numpy as np

from everstep.checkpoint import files, write_arrays
from everstep.checkpoint.array_file import ITEM_BYTES, Span, parse_header
from everstep.contracts.state import HostArray, Unread
from everstep.errors import CheckpointError, ConfigError
from everstep.untrusted_files import is_file_name, open_regular, readable

LARGEST_HEADER = 100_000_000
"""Most bytes of a header; the limit of the safetensors library."""


def open_file(path: Path) -> dict[str, Unread]:
    """List the arrays of a file by name, from its header; each is read when it is needed."""
    with readable(path, refuse), open_regular(path) as file:
        spans = _spans(path, file)
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
            if not all(type(number) is int and number >= 0 for number in span.shape):
                raise ValueError(f"{span.shape!r:.200} has other numbers than sizes")
            if span.dtype not in ITEM_BYTES:
                raise ValueError(f"{span.dtype!r:.50} is not a known element type: {', '.join(ITEM_BYTES)}")
            if math.prod(span.shape) * ITEM_BYTES[span.dtype] != span.end - span.start:
                raise ValueError(
                    f"{span.dtype} {span.shape!r:.200} does not fit {span.end - span.start:,} bytes"
                )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        refuse(path, f"is damaged: its header cannot be understood ({type(error).__name__}: {error})", error)
    data = 8 + length
    return {name: span._replace(start=data + span.start, end=data + span.end) for name, span in spans.items()}


def _read(path: Path, name: str, span: Span) -> HostArray:
    with readable(path, refuse), open_regular(path) as file:
        file.seek(span.start)
        data = np.fromfile(file, np.uint8, span.end - span.start)
    if len(data) < span.end - span.start:
        refuse(path, f"ended early while array {name!r} was read")
    return HostArray(span.dtype, span.shape, data, "")


def refuse(
    path: Path, problem: str, cause: Exception | None = None, remedy: str = "give another copy of it"
) -> NoReturn:
    raise CheckpointError(f"{path} {problem}; {remedy}") from cause


def inside(folder: Path, name: object, source: Path) -> Path:
    """Return the path of a file of a folder; `source` is the file that names it."""
    if not is_file_name(name):
        refuse(source, f"names the file {name!r:.200}, which is not a name in its folder and is not followed")
    return folder / name


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def byte_count(size: int | str) -> int:
    """Return a size as a number of bytes: 500_000_000, "500MB" or "2GiB"."""
    match = re.fullmatch(r"(\d+) ?([A-Za-z]*)", str(size))
    if match is None or match[2].upper() not in _UNITS or int(match[1]) < 1:
        raise ConfigError(f'{size!r} is not a size: give bytes, or as in "500MB", "5GB", "2GiB"')
    return int(match[1]) * _UNITS[match[2].upper()]


def write_shards(folder: Path, arrays: Mapping[str, HostArray], most: int | None = None) -> None:
    """Write arrays as `model.safetensors`, or, of more than `most` bytes, as shards with an index."""
    shards = _divided(arrays, most)
    # some readers of Hugging Face refuse a file that does not name the framework
    about = {"format": "pt"} if {array.backend for array in arrays.values()} == {"torch"} else {}
    if len(shards) == 1:
        write_arrays(folder / "model.safetensors", arrays, about)
        return
    by_file = {f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, 1)}
    for name, shard in by_file.items():
        write_arrays(folder / name, {each: arrays[each] for each in shard}, about)
    total = sum(array.data.nbytes for array in arrays.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": {each: name for name, shard in by_file.items() for each in shard},
    }
    files.write_new(folder / "model.safetensors.index.json", json.dumps(index, indent=2).encode() + b"\n")


def _divided(arrays: Mapping[str, HostArray], most: int | None) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, array in arrays.items():
        size += array.data.nbytes
        if most is not None and shards[-1] and size > most:
            shards.append([])
            size = array.data.nbytes
        shards[-1].append(name)
    return shards
