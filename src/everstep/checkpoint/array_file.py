"""Files of arrays: safetensors, each with a checksum over all of its bytes.

A *record* is what the manifest says of a file: {"bytes": size, "xxh3_128": checksum in hex}.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Container, Iterator, Mapping
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from everstep.checkpoint import files
from everstep.contracts.state import HostArray
from everstep.errors import CheckpointError, DamagedCheckpointError
from everstep.untrusted_files import open_regular, parse_json, readable

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""Bytes per element, by safetensors' name of the element type."""

Record: TypeAlias = dict[str, Any]
Bytes: TypeAlias = NDArray[np.uint8]

_METADATA = "__metadata__"
_CHUNK = 1 << 20  # bytes hashed and written (read) at a time: small enough to stay in the processor's cache


class ArrayFile(NamedTuple):
    """What was kept of the wanted arrays of a verified file, by name; and the strings beside them."""

    arrays: dict[str, Any]
    metadata: dict[str, str]


def chunks(data: memoryview) -> Iterator[memoryview]:
    return (data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK))


def write_arrays(
    path: Path, arrays: Mapping[str, HostArray], metadata: Mapping[str, str] | None = None
) -> Record:
    """Write a new safetensors file, with strings beside the arrays, and sync it; returns its record."""
    arrays = {name: arrays[name] for name in ordered(arrays)}
    header = _header(arrays, metadata)
    digest = xxhash.xxh3_128()
    with files.create(path) as out:
        # one after the other: the bytes of some are fetched only when they are asked for
        for data in chain([memoryview(header)], (a.data.data for a in arrays.values())):
            for chunk in chunks(data):
                digest.update(chunk)
                files.write(out, chunk)
        size = out.tell()
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


def ordered(arrays: Mapping[str, HostArray]) -> list[str]:
    """Sort the names of arrays as in the file: the widest elements first, so that all are aligned."""
    return sorted(arrays, key=lambda name: (-ITEM_BYTES.get(arrays[name].dtype, 1), name))


def _header(arrays: Mapping[str, HostArray], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        entries[name] = {"dtype": array.dtype, "shape": _shape(name, array), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _shape(name: str, array: HostArray) -> list[int]:
    """Return the shape for the header; of elements unknown to safetensors, the number of bytes."""
    items = ITEM_BYTES.get(array.dtype)
    if items is not None and math.prod(array.shape) * items == array.nbytes and name != _METADATA:
        return list(array.shape)
    if array.dtype == "U8" and "dtype" in array.extra:
        return [array.nbytes]
    raise CheckpointError(
        f"array {name!r} cannot be written: dtype {array.dtype!r} and shape {array.shape} do not fit its "
        f"{array.nbytes} bytes; known dtypes: {', '.join(sorted(ITEM_BYTES))}"
    )


def read_arrays(
    path: Path,
    record: Record,
    names: Container[str] | None = None,
    keep: Callable[[str, Bytes], Any] = lambda name, data: data,
    checksums: Mapping[str, str] | None = None,
) -> ArrayFile:
    """Return the wanted arrays of a file (None: all), and verify every byte of the file.

    Args:
        keep: returns what is kept of an array, by its name; called before the next one is read.
        checksums: of each wanted array's bytes, by its name: then only these arrays are read and verified.
    """
    arrays: dict[str, Any] = {}
    with readable(path, raise_damaged), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        check_size(path, size, record)
        digest = xxhash.xxh3_128()
        length = int.from_bytes(_read(file, min(8, size), digest), "little")
        text = _read(file, length if length <= size - 8 else 0, digest)
        try:
            spans, metadata = parse_header(bytes(text), size - 8 - len(text))
        except (ValueError, KeyError, TypeError, AttributeError):
            if checksums is None:  # a checksum that is wrong says more
                _pass_over(file, size - file.tell(), digest)
                check_digest(path, digest, record)
            raise_damaged(path, "is not a safetensors file")
        if lacking := sorted((checksums or {}).keys() - spans.keys()):
            raise_damaged(path, f"is not a safetensors file with {', '.join(lacking[:3])}")
        for name, span in spans.items():
            count = span.end - span.start
            if checksums is not None and name in checksums:
                data = _read(file, count, own := xxhash.xxh3_128())
                check_digest(path, own, {"xxh3_128": checksums[name]})
                arrays[name] = keep(name, data)
            elif checksums is not None:
                file.seek(count, os.SEEK_CUR)
            elif names is None or name in names:
                arrays[name] = keep(name, _read(file, count, digest))
            else:  # read for the checksum
                _pass_over(file, count, digest)
        if checksums is None:
            check_digest(path, digest, record)
    return ArrayFile(arrays, metadata)


class Span(NamedTuple):
    """Place of an array: its element type, shape, and first byte and end behind the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def parse_header(text: bytes, size: int) -> tuple[dict[str, Span], dict[str, str]]:
    """Understand a header before `size` bytes of arrays: arrays by name in their order, and the metadata.

    A ValueError, KeyError, TypeError or AttributeError says that it is not that of a safetensors file.
    """
    entries = parse_json(text, once=True)
    metadata = entries.pop(_METADATA, {})
    if not isinstance(metadata, dict):
        raise TypeError("its metadata are no strings by name")
    items = [(name, Span(a["dtype"], tuple(a["shape"]), *a["data_offsets"])) for name, a in entries.items()]
    spans, end = dict(sorted(items, key=lambda item: item[1][2:])), 0
    for name, span in spans.items():
        if {type(span.start), type(span.end)} != {int} or span.start != end or span.end < end:
            raise ValueError(f"array {name!r:.200} begins at byte {span.start:,} in place of {end:,}")
        end = span.end
    if end != size:
        raise ValueError(f"its arrays end at byte {end:,}, and the file has {size:,} for them")
    return spans, metadata


def _read(file: FileIO, count: int, digest: xxhash.xxh3_128) -> Bytes:
    data = np.empty(count, np.uint8)
    for chunk in chunks(data.data):
        _fill(file, chunk, digest)
    return data


def _pass_over(file: FileIO, count: int, digest: xxhash.xxh3_128) -> None:
    buffer = memoryview(bytearray(min(count, _CHUNK)))
    for start in range(0, count, _CHUNK):
        _fill(file, buffer[: count - start], digest)


def _fill(file: FileIO, chunk: memoryview, digest: xxhash.xxh3_128) -> None:
    rest = chunk
    while rest:
        count = file.readinto(rest)
        if not count:
            raise_damaged(Path(str(file.name)), "ended early while it was read")
        rest = rest[count:]
    digest.update(chunk)


def verified_chunks(path: Path, record: Record) -> Iterator[memoryview]:
    """Yield the bytes of a file, each chunk in the same memory; at their end raise unless they are right."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK))
    with readable(path, raise_damaged), open_regular(path) as file:
        check_size(path, os.fstat(file.fileno()).st_size, record)
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            yield buffer[:count]
    check_digest(path, digest, record)


def copy_file(source: Path, target: Path, record: Record) -> None:
    """Copy a file durably, and verify the bytes that are copied."""
    with files.create(target) as out:
        for chunk in verified_chunks(source, record):
            files.write(out, chunk)


def check_size(path: Path, size: int, record: Record) -> None:
    if size != record["bytes"]:
        raise_damaged(path, f"has {size} bytes, {record['bytes']} were written" if size else "is empty")


def check_digest(path: Path, checksum: xxhash.xxh3_128, record: Record) -> None:
    if checksum.hexdigest() != record["xxh3_128"]:
        how = "has changed since it was written, or belongs to another checkpoint"
        raise_damaged(path, f"{how}: checksum {record['xxh3_128']}, now {checksum.hexdigest()}")


def raise_damaged(path: Path, how: str, cause: Exception | None = None) -> NoReturn:
    raise DamagedCheckpointError(f"checkpoint {path.parent.name} is damaged: {path} {how}") from cause
