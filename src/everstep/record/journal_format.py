"""Files of a journal, one for each segment: a header, then frames; read despite any damage.

All numbers are little-endian:

    header   magic (8 bytes), version u32, segment u32, parent segment u32 (0: none),
             parent offset u64, xxh3_64 of the 28 bytes before it
    frame    marker (4 bytes), payload length u32, kind u32, offset u64, xxh3_64 of the payload
             seeded with xxh3_64 of the 20 bytes before it, payload
    event    (kind 1) JSON {"kind", "time", "wall", "data"}
    metrics  (kind 2) one block: time f64 (of the newest row), epoch i64, rows u32, byte lengths of phase,
             name and columns u32, wall u8, phase, name, the columns steps, counts, seqs (the differences
             from row to row as i64, compressed by zlib), then values as f64

A frame's offset is its place in the file: a frame elsewhere shows that bytes were removed or added.
The header's layout is the same in every version, so that an old everstep can name a new version.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from everstep.contracts.metrics import Block
from everstep.errors import JournalError
from everstep.record.event_fields import DEEPEST, levels, misfit
from everstep.untrusted_files import open_regular, parse_json, require_no_hole

VERSION = 2
EVENT, METRICS = 1, 2
LATEST = 1e11
"""Upper limit of a time, in seconds since 1970 (in the year 5138): a later time is damage."""

_MAGIC = b"\x89EVJ\r\n\x1a\n"
_MARKER = b"\xe5\x1aEV"
_HEADER = struct.Struct("<8sIIIQ")
_CHECKSUM = struct.Struct("<Q")
_FRAME = struct.Struct("<4sIIQ")  # and a checksum
_BLOCK = struct.Struct("<dqIIIIB")
_EVENT = {"kind": str, "data": dict, "wall": bool, "time": int | float}
"""Fields of an event."""

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
    """Unpack the header of a file's bytes; None if it is torn or damaged."""
    packed, checksum = data[: _HEADER.size], data[_HEADER.size : HEADER_SIZE]
    if checksum != _CHECKSUM.pack(xxhash.xxh3_64_intdigest(packed)):
        return None
    magic, version, segment, parent, offset = _HEADER.unpack(packed)
    return Header(version, segment, Position(parent, offset) if parent else None) if magic == _MAGIC else None


def pack_frame(kind: int, offset: int, payload: bytes) -> bytes:
    head = _FRAME.pack(_MARKER, len(payload), kind, offset)
    return head + _digest(head, payload) + payload


def _digest(head: bytes | memoryview, payload: bytes | memoryview) -> bytes:
    # The head seeds the payload's checksum: damage to a length or an offset shows as damage to the payload.
    return _CHECKSUM.pack(xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(head)))


def scan(data: bytes, start: int) -> Iterator[Frame | Hole]:
    """Yield the frames of a file's bytes from `start` on, and a hole wherever bytes are not a frame."""
    view, budget, at = memoryview(data), _PATIENCE * len(data), start
    while 0 <= at < len(data) and budget >= 0:
        frame = _frame_at(view, at)
        if frame is None:
            # not past the length that a false frame claims: a true frame may lie within
            if data.startswith(_MARKER, at):
                claimed = int.from_bytes(data[at + 4 : at + 8], "little")
                budget -= _FALSE + min(claimed, len(data) - at)
            at = data.find(_MARKER, at + 1)
            continue
        if start < at:
            yield Hole(start, at)
        yield frame
        at = start = frame.end
    if start < len(data):
        yield Hole(start, len(data))


def _frame_at(view: memoryview, start: int) -> Frame | None:
    body = start + FRAME_SIZE
    if body > len(view):
        return None
    marker, length, kind, offset = _FRAME.unpack_from(view, start)
    payload = view[body : body + length]
    head = view[start : start + _FRAME.size]
    if marker != _MARKER or len(payload) != length or view[body - 8 : body] != _digest(head, payload):
        return None
    return Frame(start, body + length, kind, offset, payload)


def pack_event(kind: str, data: dict[str, Any], wall: bool, time: float) -> bytes:
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


def unpack_event(payload: memoryview) -> dict[str, Any]:
    """Undo `pack_event`: return kind, data, wall, time."""
    with suppress(ValueError):
        record = parse_json(payload)
        fits = isinstance(record, dict) and all(isinstance(record.get(k), t) for k, t in _EVENT.items())
        if fits and not _is_deep(bytes(payload), record) and 0 <= record["time"] < LATEST:
            return {name: record[name] for name in _EVENT}
    raise ValueError("is not an event")


def _is_deep(packed: bytes, record: Any) -> bool:
    return packed.count(b"[") + packed.count(b"{") > DEEPEST and levels(record) > DEEPEST


def joined_blocks(blocks: list[Block]) -> Block:
    """Join blocks of one metric, epoch and phase."""
    columns = zip(*(block[4:] for block in blocks), strict=True)
    return Block(*blocks[0][:4], *(list(chain.from_iterable(column)) for column in columns))


def pack_block(block: Block, time: float) -> bytes:
    """Pack a block, whose columns are of equal length, as a frame's payload."""
    phase, name = (text.encode("utf-8", "surrogatepass") for text in (block.phase, block.name))
    columns = np.array([block.steps, block.counts, block.seqs], np.int64)
    packed = zlib.compress(np.diff(columns, prepend=0).astype("<i8").tobytes(), 1)
    lengths = len(phase), len(name), len(packed)
    head = _BLOCK.pack(time, block.epoch, len(block.steps), *lengths, block.wall)
    return b"".join((head, phase, name, packed, np.array(block.values, "<f8").tobytes()))


def _unpack_columns(
    payload: memoryview,
) -> tuple[tuple[int, str, str, bool], NDArray[np.int64], NDArray[np.float64]]:
    """Return a packed block's (epoch, phase, name, wall), differences in its three columns, and its values.

    ValueError: it has not exactly the bytes of the rows that it claims.
    """
    if len(payload) < _BLOCK.size:
        raise ValueError("its head is torn")
    time, epoch, rows, *lengths, wall = _BLOCK.unpack_from(payload)
    at, parts = _BLOCK.size, list[bytes]()
    for length in lengths:
        parts.append(bytes(payload[at : at + length]))
        at += length
    if not (rows > 0 and 0 <= time < LATEST and at + 8 * rows == len(payload)):
        raise ValueError(f"{len(payload)} bytes are not those of {rows} rows")
    try:  # no more than a block of so many values has, whatever the bytes claim
        differences = zlib.decompressobj().decompress(parts[2], 24 * rows + 1)
    except zlib.error as error:
        raise ValueError("its columns are damaged") from error
    columns = np.frombuffer(differences, "<i8").reshape(3, rows)
    phase, name = (part.decode("utf-8", "surrogatepass") for part in parts[:2])
    return (epoch, phase, name, bool(wall)), columns, np.frombuffer(payload[at:], "<f8")


def unpack_block(payload: memoryview) -> Block:
    head, differences, values = _unpack_columns(payload)
    steps, counts, seqs = np.cumsum(differences, axis=1).tolist()
    return Block(*head, steps, values.tolist(), counts, seqs)


def block_columns(payload: memoryview) -> tuple[float, NDArray[np.int64], NDArray[np.float64]]:
    """Return a packed block's time, and its steps and values, one of each per row.

    ValueError: it is damaged.
    """
    _, differences, values = _unpack_columns(payload)
    return _BLOCK.unpack_from(payload)[0], np.cumsum(differences[0]), values


GROUP = 64
"""Rows of a block that are one group in its sketch."""


def sketch(payload: memoryview) -> bytes:
    """Return what a chart of very many rows needs of a packed block, as float64.

    First the numbers of its rows, and of its values that are not finite; then of each `GROUP` rows the last
    step, and the least, the largest and the last value.
    """
    _, steps, values = block_columns(payload)
    first = np.arange(0, len(values), GROUP)
    last = np.minimum(first + GROUP, len(values)) - 1
    packed = np.empty(2 + 4 * len(first), "<f8")
    packed[0], packed[1] = len(values), len(values) - np.count_nonzero(np.isfinite(values))
    groups = packed[2:].reshape(-1, 4)
    groups[:, 0], groups[:, 3] = steps[last], values[last]
    groups[:, 1], groups[:, 2] = np.fmin.reduceat(values, first), np.fmax.reduceat(values, first)
    return packed.tobytes()


def float_bits(values: list[float]) -> list[int]:
    """Return the 64 bits of each value: two metrics are "equal" if their bits are."""
    bits: list[int] = np.array(values, np.float64).view(np.uint64).tolist()
    return bits


def bits_float(bits: int) -> float:
    """Undo `float_bits` for a single value."""
    value: float = struct.unpack("<d", struct.pack("<Q", bits))[0]
    return value


_FILE_NAME = re.compile(r"segment-([0-9]{4,9})\.evj")
_CHECKPOINT = re.compile(r"(?:epoch-([0-9]{4,18})-)?step-([0-9]{8,18})")


class Event(NamedTuple):
    """Something that happened; `time` in seconds since 1970, `offset` its place in its segment."""

    segment: int
    offset: int
    kind: str
    data: dict[str, Any]
    wall: bool
    time: float

    @property
    def completed(self) -> tuple[int, int]:
        """(step, epoch) that the event says are complete, or begun; 0 where it says nothing."""
        data = self.data
        if self.kind == "segment":
            return _in_name(data["facts"].get("resumed_from"))
        if self.kind == "checkpoint":
            return _in_name(data["name"])
        if self.kind == "times":
            return (data.get("steps") or [0])[-1], data.get("epoch", 0)
        if self.kind in ("progress", "interrupted", "ended", "closed"):
            return data.get("step", 0), data.get("epoch", 0)
        return 0, 0


def _in_name(checkpoint: object) -> tuple[int, int]:
    match = _CHECKPOINT.fullmatch(checkpoint) if isinstance(checkpoint, str) else None
    return (int(match[2]), int(match[1] or 0)) if match else (0, 0)


def step_of(checkpoint: object) -> int:
    """Return the step in a checkpoint's name; 0 for what is not a checkpoint's name."""
    return _in_name(checkpoint)[0]


class StoredBlock(NamedTuple):
    """Block as it lies in the file, unpacked on request, so that a long run fits in memory."""

    offset: int
    payload: memoryview

    @property
    def block(self) -> Block:
        return unpack_block(self.payload)

    @property
    def end(self) -> tuple[int, int]:
        """Epoch of the rows, and the last of their steps."""
        block = self.block
        return block.epoch, max(block.steps)

    def divide_at_last_step(self) -> tuple[list[StoredBlock], StoredBlock]:
        """Return a block of the rows before the last step, if there are any, and one of the others."""
        block = self.block
        rows, last = [*zip(*block[4:], strict=True)], max(block.steps)
        parts = [row for row in rows if row[0] != last], [row for row in rows if row[0] == last]
        blocks = (Block(*block[:4], *map(list, zip(*part, strict=True))) for part in parts if part)
        *earlier, of_last = (
            self._replace(payload=memoryview(pack_block(each, self.time))) for each in blocks
        )
        return earlier, of_last

    @property
    def time(self) -> float:
        """Time when the newest row of the block was added, in seconds since 1970."""
        time: float = _BLOCK.unpack_from(self.payload)[0]
        return time


Item: TypeAlias = Event | StoredBlock
"""Entry of a journal."""


@dataclass
class Segment:
    """Content of one file of a journal, which the start `number`, from 1, has written.

    Attributes:
        end: the offset after the last whole frame; 0 if there is none.
        size: the bytes of the file up to the end of that frame; later bytes are torn, or being written.
        started: False if a kill came before the start was written, or the file has only a person's decision.
        parent: the position that the segment continues from; None if it started from nothing.
        events, blocks: in the order of writing.
        problems, torn: descriptions of damaged places; of a torn end, as a kill leaves it.
    """

    number: int
    path: Path
    end: int = 0
    size: int = 0
    started: bool = False
    parent: Position | None = None
    events: list[Event] = field(default_factory=list)
    blocks: list[StoredBlock] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    torn: str = ""


def segment_path(run_dir: Path, segment: int) -> Path:
    return run_dir / "journal" / f"segment-{segment:04d}.evj"


def segment_number(path: Path) -> int | None:
    """Parse the number in a journal file's name; None for any other file."""
    match = _FILE_NAME.fullmatch(path.name)
    number = int(match[1]) if match else 0
    return number if number and segment_path(Path(), number).name == path.name else None


def read_segment(path: Path, start: int = 0, run: str | None = None) -> Segment:
    """Read one file of a journal, despite any damage in the file.

    Args:
        start: the `size` that an earlier reading returned: only later frames are returned.
        run: the id of the run; a file that another run's start has written has no row.  None: not asked.
    """
    is_continued, start = start > HEADER_SIZE, max(start, HEADER_SIZE)
    with open_regular(path) as file:
        require_no_hole(file)
        head = file.read(HEADER_SIZE)
        file.seek(start)
        data = file.read()
    header = unpack_header(head)
    if header is not None and header.version != VERSION:
        message = f"{path} has journal format {header.version}, this everstep reads only {VERSION}"
        raise JournalError(f"{message}; use the everstep that wrote it")
    number = segment_number(path) or (header.segment if header else 0)
    if header is not None and header.segment != number:
        # perhaps of another run: none of its rows may count as this start's
        return _unread_segment(number, path, f"its header says segment {header.segment}; was it renamed?")
    segment = Segment(number, path, size=start if len(head) == HEADER_SIZE else len(head))
    if header is None and head:
        segment.problems.append(f"{path.name}: the header ({HEADER_SIZE} bytes at 0) is torn or damaged")
    _add_frames(segment, data, start, shift=None if is_continued else 0)
    starts = [event.data for event in segment.events if event.kind == "segment"]
    writer = next((each["run"] for each in starts if each.get("run") is not None), run)
    if run is not None and writer != run:
        return _unread_segment(number, path, f"the run {writer} has written it, and this is {run};")
    if header is not None:
        segment.parent = header.parent
    elif starts and starts[0].get("parent"):
        segment.parent = Position(*starts[0]["parent"])
    only_decided = bool(segment.events) and all(event.kind == "decision" for event in segment.events)
    is_start = header is not None and (not only_decided or is_continued or bool(segment.blocks))
    segment.started = is_start or bool(starts)
    return segment


def _add_frames(segment: Segment, data: bytes, start: int, shift: int | None) -> None:
    """Add the frames of bytes from `start` on, which were written `shift` bytes further on; None: unknown."""
    last, problems = -1, list[str]()
    for each in scan(data, 0):
        at, length = start + each.start, each.end - each.start
        if isinstance(each, Hole):
            if each.end == len(data):
                segment.torn = (
                    f"{segment.path.name}: the last {length} bytes, from {at} on, are torn; they are dropped"
                )
            else:
                problems.append(f"{length} bytes at {at} are damaged; they are skipped")
            continue
        segment.size = start + each.end
        if each.offset <= last:  # offsets only grow, so a file that was copied together counts no row twice
            problems.append(f"the frame at {at} is repeated or out of order; it is skipped")
            continue
        if shift not in (None, each.offset - at):
            problems.append(f"the frame at {at} was written at {each.offset}; what is before it was changed")
        shift, last, segment.end = each.offset - at, each.offset, each.offset + length
        try:
            _add_frame(segment, each)
        except ValueError as error:
            problems.append(f"the frame at {at} {error}; it is skipped")
    segment.problems += [f"{segment.path.name}: {problem}" for problem in problems]


def _add_frame(segment: Segment, frame: Frame) -> None:
    """Unpack a frame; a ValueError says why it holds nothing."""
    if frame.kind == METRICS:
        try:
            _unpack_columns(frame.payload)
        except ValueError as error:
            raise ValueError(f"claims rows that its {len(frame.payload)} bytes do not hold") from error
        segment.blocks.append(StoredBlock(frame.offset, frame.payload))
    elif frame.kind == EVENT:
        event = unpack_event(frame.payload)
        if problem := misfit(event["kind"], event["data"]):
            raise ValueError(f"is not an event of kind {event['kind'][:40]!r} ({problem})")
        segment.events.append(Event(segment.number, frame.offset, **event))
    else:
        raise ValueError(f"is of unknown kind {frame.kind}")


def _unread_segment(number: int, path: Path, reason: str) -> Segment:
    return Segment(number, path, problems=[f"{path.name}: {reason} no row of it is read"])


def in_order(segment: Segment) -> list[Item]:
    """List the events and blocks of a segment as they were written."""
    items: list[Item] = [*segment.events, *segment.blocks]
    return sorted(items, key=lambda item: item.offset)


def read_or_miss(number: int, path: Path, run: str | None = None) -> Segment:
    """Read a file of a journal; a file that cannot be read counts as damaged from end to end."""
    try:
        return read_segment(path, run=run)
    except OSError as error:
        return _unread_segment(number, path, f"it cannot be read ({error.strerror});")
