"""Bytes of a journal file: a header, then frames.  All numbers are little-endian.

    header   magic (8 bytes), version u32, segment u32, parent segment u32 (0: none),
             parent offset u64, xxh3_64 of the 28 bytes before it
    frame    marker (4 bytes), payload length u32, kind u32, offset u64, xxh3_64 of the payload
             seeded with xxh3_64 of the 20 bytes before it, payload
    event    (kind 1) JSON {"kind", "time", "wall", "data"}
    metrics  (kind 2) one block: time f64 (of the newest row), epoch i64, rows u32, byte lengths of phase
             and name u32, wall u8, phase, name, the columns steps, counts, seqs, then values as f64
    column   width u8, base i64; width 0: stride i64, the column is base + i * stride; else an
             unsigned number of `width` bytes per row, the column is base + number

A frame's offset is its place in the file: a frame elsewhere shows that bytes were removed or added.
The header's layout is the same in every version, so that an old everstep can name a new version.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from everstep.contracts.metrics import Block
from everstep.errors import JournalError
from everstep.record.event_fields import DEEPEST, levels
from everstep.untrusted_files import parse_json

VERSION = 1
EVENT, METRICS = 1, 2

_MAGIC = b"\x89EVJ\r\n\x1a\n"
_MARKER = b"\xe5\x1aEV"
_HEADER = struct.Struct("<8sIIIQ")
_CHECKSUM = struct.Struct("<Q")
_FRAME = struct.Struct("<4sIIQ")  # and a checksum
_BLOCK = struct.Struct("<dqIIIB")
_COLUMN = struct.Struct("<Bq")
_STRIDE = struct.Struct("<q")
_WIDTHS = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}

_PATIENCE = 16
"""Limit of bytes hashed in vain, in file sizes: each of many false frames may claim the rest of the file."""

_FALSE = 1024
"""Bytes that a false frame counts, beside those that it claims: less than `_PATIENCE` times a true frame."""

HEADER_SIZE = _HEADER.size + _CHECKSUM.size
FRAME_SIZE = _FRAME.size + _CHECKSUM.size


class Position(NamedTuple):
    """Place in a run's journal: `offset` bytes into the file of segment number `segment`."""

    segment: int
    offset: int


class Header(NamedTuple):
    version: int
    segment: int
    parent: Position | None


class Frame(NamedTuple):
    """Whole frame: bytes [start, end) of what was read; `offset` is where it was written in the file."""

    start: int
    end: int
    kind: int
    offset: int
    payload: memoryview


class Hole(NamedTuple):
    """Bytes [start, end) of a file that are not a frame: torn or damaged."""

    start: int
    end: int


def pack_header(segment: int, parent: Position | None) -> bytes:
    packed = _HEADER.pack(_MAGIC, VERSION, segment, *(parent or (0, 0)))
    return packed + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(packed))


def unpack_header(data: bytes) -> Header | None:
    """Unpack the header of a file's bytes; None if the header is torn or damaged."""
    packed, checksum = data[: _HEADER.size], data[_HEADER.size : HEADER_SIZE]
    if checksum != _CHECKSUM.pack(xxhash.xxh3_64_intdigest(packed)):
        return None
    magic, version, segment, parent, offset = _HEADER.unpack(packed)
    if magic != _MAGIC:
        return None
    return Header(version, segment, Position(parent, offset) if parent else None)


def pack_frame(kind: int, offset: int, payload: bytes) -> bytes:
    head = _FRAME.pack(_MARKER, len(payload), kind, offset)
    return head + _digest(head, payload) + payload


def _digest(head: bytes | memoryview, payload: bytes | memoryview) -> bytes:
    # The head seeds the payload's checksum: damage to a length or an offset shows as damage to the payload.
    return _CHECKSUM.pack(xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(head)))


def scan(data: bytes, start: int) -> Iterator[Frame | Hole]:
    """Yield the frames of a file's bytes from `start` on, and a hole wherever bytes are not a frame."""
    view = memoryview(data)
    budget = _PATIENCE * len(data)
    while start < len(data):
        found: Frame | Hole | None = _frame_at(view, start)
        if found is None:
            end, budget = _next_frame(data, view, start + 1, budget)
            found = Hole(start, end)
        yield found
        start = found.end


def _frame_at(view: memoryview, start: int) -> Frame | None:
    body = start + FRAME_SIZE
    if body > len(view):
        return None
    marker, length, kind, offset = _FRAME.unpack_from(view, start)
    payload = view[body : body + length]
    if marker != _MARKER or len(payload) != length:
        return None
    head = view[start : start + _FRAME.size]
    if view[start + _FRAME.size : body] != _digest(head, payload):
        return None
    return Frame(start, body + length, kind, offset, payload)


def _next_frame(data: bytes, view: memoryview, start: int, budget: int) -> tuple[int, int]:
    """Find where the next frame begins, and how many bytes may still be hashed in vain."""
    while budget > 0 and (start := data.find(_MARKER, start)) >= 0:
        if _frame_at(view, start) is not None:
            return start, budget
        budget -= _FALSE + min(int.from_bytes(data[start + 4 : start + 8], "little"), len(data) - start)
        start += 1  # not past the length that the false frame claims: a true frame may lie within
    return len(data), budget


def pack_event(kind: str, data: dict[str, Any], wall: bool, time: float) -> bytes:
    """Pack an event as a frame's payload."""
    record = {"kind": kind, "time": time, "wall": wall, "data": data}
    try:
        packed = json.dumps(record, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise JournalError(
            f"event {kind!r} cannot be recorded: {error}; give dicts, lists, strings, numbers, None"
        ) from error
    if _is_deep(packed, record):
        raise JournalError(
            f"event {kind!r} cannot be recorded: it has more than {DEEPEST} levels of lists and dicts; "
            "give a flatter configuration"
        )
    return packed


def _is_deep(packed: bytes, record: Any) -> bool:
    return packed.count(b"[") + packed.count(b"{") > DEEPEST and levels(record) > DEEPEST


def unpack_event(payload: memoryview) -> dict[str, Any]:
    """Undo `pack_event`: return kind, data, wall, time."""
    record = parse_json(payload)
    fits = isinstance(record, dict) and all(isinstance(record.get(k), t) for k, t in _EVENT.items())
    if not fits or _is_deep(bytes(payload), record) or not 0 <= record["time"] < LATEST:
        raise ValueError("it is not an event")
    return dict(record)


LATEST = 1e11
"""Upper limit of a time, in seconds since 1970 (in the year 5138): a later time is damage."""

_EVENT = {"kind": str, "data": dict, "wall": bool, "time": int | float}


def require_equal_columns(block: Block) -> None:
    """Refuse a block whose columns differ in length."""
    if not len(block.steps) == len(block.values) == len(block.counts) == len(block.seqs):
        lengths = [len(column) for column in block[4:]]
        raise JournalError(f"block {block.name!r} has columns of lengths {lengths}; give equal lengths")


def joined_blocks(blocks: list[Block]) -> Block:
    """Join blocks of one metric, epoch and phase."""
    columns = zip(*(block[4:] for block in blocks), strict=True)
    return Block(*blocks[0][:4], *(list(chain.from_iterable(column)) for column in columns))


def pack_block(block: Block, time: float) -> bytes:
    """Pack a block, whose columns are of equal length, as a frame's payload."""
    rows = len(block.steps)
    phase, name = (text.encode("utf-8", "surrogatepass") for text in (block.phase, block.name))
    head = _BLOCK.pack(time, block.epoch, rows, len(phase), len(name), block.wall)
    columns = [_pack_column(column) for column in (block.steps, block.counts, block.seqs)]
    values = np.array(block.values, "<f8").tobytes()
    return b"".join((head, phase, name, *columns, values))


def unpack_block(payload: memoryview) -> Block:
    _, epoch, rows, phase, name, wall = _BLOCK.unpack_from(payload)
    at = _BLOCK.size + phase + name
    columns = []
    for _ in range(3):
        column, at = _column(payload, at, rows)
        columns.append(column.tolist())
    values = np.frombuffer(payload, "<f8", rows, at).tolist()
    return Block(epoch, *block_names(payload), bool(wall), columns[0], values, *columns[1:])


def block_columns(payload: memoryview) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the steps and values of a packed block, one of each per row."""
    _, _, rows, phase, name, _ = _BLOCK.unpack_from(payload)
    steps, _ = _column(payload, _BLOCK.size + phase + name, rows)
    return steps, np.frombuffer(payload, "<f8", rows, len(payload) - 8 * rows)


def _column(payload: memoryview, at: int, rows: int) -> tuple[NDArray[np.int64], int]:
    """Unpack a column as an array; also return where the next column begins."""
    width, base = _COLUMN.unpack_from(payload, at)
    at += _COLUMN.size
    if width == 0:
        (stride,) = _STRIDE.unpack_from(payload, at)
        return base + stride * np.arange(rows, dtype=np.int64), at + _STRIDE.size
    offsets = np.frombuffer(payload, _WIDTHS[width], rows, at).astype(np.uint64)
    return (offsets + np.int64(base).view(np.uint64)).view(np.int64), at + width * rows


def block_names(payload: memoryview) -> tuple[str, str]:
    """Return the phase and name of a packed block."""
    _, _, _, phase, name, _ = _BLOCK.unpack_from(payload)
    at = _BLOCK.size
    parts = (payload[at : at + phase], payload[at + phase : at + phase + name])
    first, second = (bytes(part).decode("utf-8", "surrogatepass") for part in parts)
    return first, second


def is_block(payload: memoryview) -> bool:
    """Whether a payload has exactly the bytes of the rows that it claims."""
    if len(payload) < _BLOCK.size:
        return False
    time, _, rows, phase, name, _ = _BLOCK.unpack_from(payload)
    at = _BLOCK.size + phase + name
    if not 0 <= time < LATEST:
        return False
    try:
        block_names(payload)
    except UnicodeDecodeError:
        return False
    for _ in range(3):
        if at + _COLUMN.size > len(payload):
            return False
        width, _ = _COLUMN.unpack_from(payload, at)
        if width and width not in _WIDTHS:
            return False
        at += _COLUMN.size + (width * rows if width else _STRIDE.size)
    return bool(rows > 0 and at + 8 * rows == len(payload))


def block_time(payload: memoryview) -> float:
    """Return when the newest row of a packed block was added, in seconds since 1970."""
    time: float = _BLOCK.unpack_from(payload)[0]
    return time


def float_bits(values: list[float]) -> list[int]:
    """Return the 64 bits of each value: two metrics are "equal" if their bits are."""
    bits: list[int] = np.array(values, np.float64).view(np.uint64).tolist()
    return bits


def bits_float(bits: int) -> float:
    """Undo `float_bits` for a single value."""
    (value,) = struct.unpack("<d", struct.pack("<Q", bits))
    return float(value)


def _pack_column(column: list[int]) -> bytes:
    first = column[0]
    if column.count(first) == len(column):
        return _COLUMN.pack(0, first) + _STRIDE.pack(0)
    array: NDArray[np.int64] = np.array(column, np.int64)
    stride = column[1] - first
    # The last element alone rules out most columns, before the slower comparison of all differences.
    if column[-1] == first + stride * (len(column) - 1) and (np.diff(array) == stride).all():
        return _COLUMN.pack(0, first) + _STRIDE.pack(stride)
    base = array.min()
    offsets = array.view(np.uint64) - base.view(np.uint64)  # modulo 2**64: no range overflows
    width = np.min_scalar_type(int(offsets.max())).itemsize
    packed: bytes = offsets.astype(_WIDTHS[width]).tobytes()
    return _COLUMN.pack(width, int(base)) + packed
