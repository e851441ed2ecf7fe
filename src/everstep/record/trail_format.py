"""Format of a trail's file, and its reader.

    header   magic (8 bytes), version u32, segment u32, then two states; the newer whole state counts
    state    words of 8 bytes: the end of the published records, the last complete step, the step after which
             every record found room, and a checksum over those three and all records before that end
    record   step u64, value u64 or f64, epoch u32, count u32, key u16, seq u16, flags u32 (32 bytes)

A file without a state that fits its checksum is not a trail: a wrong bit would show as a divergence that
never was, or as millions of steps.  Numbers are in the machine's byte order.  A record counts once it is
published, whole steps at a time.  A key is a pair (phase, name); a record defines the key before the first
use, and the pair in JSON follows that record.

| phase | name | value |
|---|---|---|
| batch | stream | digest of a batch as it was handed out; `epoch` is its pass, `seq` its place in the step |
| pass | stream | none: pass `epoch` of the stream ended, and `step` was the last that drew from the stream |
| copy | phase of a snapshot / part | digest of that part of the state as it was copied |
| step | metric | sum of `count` values collected in the step; or their mean (FOLDED) |
| others | metric | as the journal has it |
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

from everstep.record.segment_file import segment_path
from everstep.untrusted_files import open_regular, parse_json, read_regular

VERSION = 3
LARGEST = 1 << 26
"""Largest size of the file, in bytes."""

_STEPS = LARGEST // 32
"""Limit on the steps that a file may claim: a forged file may claim more than it has room for."""

ABSENT, KEY, FOLDED = 1, 2, 4
"""Flags of a record: the value is not on the host, or unknown; a key's definition; a mean."""

MAGIC = b"\x89EVT\r\n\x1a\n"
HEADER = struct.Struct("=8sII")
BITS = struct.Struct("=QQIIHHI")
FLOAT = struct.Struct("=QdIIHHI")
SIZE = BITS.size
STATE = struct.Struct("=4Q")
STATES = (16, 48)
"""Offsets of the two states in the file."""
START = 96


class Mark(NamedTuple):
    """Record of a trail; `value` is the bits of a number, or a digest."""

    step: int
    value: int
    epoch: int
    count: int  # type: ignore[assignment]  # as in Row
    phase: str
    name: str
    seq: int
    flags: int


def trail_path(run_dir: Path, segment: int, rank: int = 0) -> Path:
    """Path of a rank's trail of a segment."""
    return segment_path(run_dir, segment).with_suffix(f".rank-{rank:05d}.trail" if rank else ".trail")


def definition(text: bytes) -> int:
    """Size of a key's definition, in bytes."""
    return SIZE + -(-len(text) // SIZE) * SIZE


class TrailContent(NamedTuple):
    """Content of a trail.

    Attributes:
        whole: all steps after this step are recorded in full.
        last: the last complete step.
        marks: in the order of writing.
    """

    whole: int
    last: int
    marks: list[Mark]


def read_trail(path: Path) -> TrailContent | None:
    """Read the published records of a trail's file; None if it is missing, damaged or of another version."""
    try:
        data = memoryview(read_regular(path, LARGEST))
    except OSError:
        return None
    for end, last, whole, check in _states(data):
        digest = xxhash.xxh3_64_intdigest(data[START:end])
        if START <= end <= len(data) and check == checksum(end, last, whole, digest):
            marks = published(data, end)
            return None if marks is None or last - whole > _STEPS else TrailContent(whole, last, marks)
    return None


def checksum(end: int, last: int, whole: int, digest: int) -> int:
    """Compute a state's checksum (xxh3_64) from its other words and the digest (xxh3_64) of the records."""
    return xxhash.xxh3_64_intdigest(STATE.pack(end, last, whole, digest))


def last_step(path: Path) -> int | None:
    """Read the last complete step from a trail's header alone; None if the file has no such header."""
    try:
        with open_regular(path) as file:
            states = list(_states(memoryview(file.read(START))))
    except OSError:
        return None
    return states[0][1] if states else None


def newest_step(run_dir: Path, segment: int) -> int:
    """Read the last complete step of a start from its ranks' trails; 0 without a trail."""
    trails = segment_path(run_dir, segment).parent.glob(f"segment-{segment:04d}*.trail")
    return max((last_step(path) or 0 for path in trails), default=0)


def _states(data: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Yield the states in a trail's header, the newer first; none for another header or version."""
    if len(data) >= START and HEADER.unpack_from(data)[:2] == (MAGIC, VERSION):
        found = [STATE.unpack_from(data, at) for at in STATES]
        yield from sorted(found, reverse=True)


def published(data: memoryview, end: int) -> list[Mark] | None:
    """List the records up to `end`; None if a record is invalid (after a power cut, pages may be missing)."""
    keys: dict[int, tuple[str, str]] = {}
    marks = []
    at = START
    while at + SIZE <= end:
        step, value, epoch, count, key, seq, flags = BITS.unpack_from(data, at)
        at += SIZE
        if flags & KEY:
            try:
                phase, name = parse_json(data[at : at + count])
            except (TypeError, ValueError):
                return None
            keys[key] = (str(phase), str(name))
            at += -(-count // SIZE) * SIZE
        elif key in keys:
            marks.append(Mark(step, value, epoch, count, *keys[key], seq, flags))
        else:
            return None
    return marks
