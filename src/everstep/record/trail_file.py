"""The form of a trail's file, and reading one.

    header   magic (8 bytes), version u32, segment u32, then two states, of which the newer whole one counts
    state    words of 8 bytes: where the published records end, the last complete step, the step after which
             nothing found no room, and a checksum over those three and all records before that end
    record   step u64, value u64 or f64, epoch u32, count u32, key u16, seq u16, flags u32 (32 bytes)

One wrong bit would be a divergence that never was, or millions of steps: what no checksum fits is no trail.
Numbers are in the machine's byte order.  A record counts once it is published, whole steps at a time.  A key
is a pair (phase, name); a record defines it before the first that uses it, and its text follows.

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

from everstep.record.reading import segment_path
from everstep.regular import open_regular, parse_json, read_regular

VERSION = 2
LARGEST = 1 << 26
"""Bytes of the file, at most."""

_STEPS = LARGEST // 32
"""A forged file may claim more steps than it has room for."""

ABSENT, KEY, FOLDED = 1, 2, 4
"""Flags: the value is not on the host, or cannot be told; a key's definition; a mean."""

MAGIC = b"\x89EVT\r\n\x1a\n"
HEADER = struct.Struct("=8sII")
BITS = struct.Struct("=QQIIHHI")
FLOAT = struct.Struct("=QdIIHHI")
SIZE = BITS.size
STATE = struct.Struct("=4Q")
STATES = (16, 48)
"""Where the two states begin."""
START = 96


class Mark(NamedTuple):
    """One record: `value` are the bits of a number, or a digest."""

    step: int
    value: int
    epoch: int
    count: int  # type: ignore[assignment]  # as of a Row
    phase: str
    name: str
    seq: int
    flags: int


def trail_path(run_dir: Path, segment: int) -> Path:
    """The trail's file of one segment."""
    return segment_path(run_dir, segment).with_suffix(".trail")


def definition(text: bytes) -> int:
    """Bytes of a key's definition."""
    return SIZE + -(-len(text) // SIZE) * SIZE


class Trace(NamedTuple):
    """What a trail has.

    Attributes:
        whole: the steps after this one are all there.
        last: the last complete step.
        marks: in the order of writing.
    """

    whole: int
    last: int
    marks: list[Mark]


def read_trail(path: Path) -> Trace | None:
    """What is published in a trail's file; None if there is none, or it is damaged or another version's."""
    try:
        data = memoryview(read_regular(path, LARGEST))
    except OSError:
        return None
    for end, last, whole, check in _states(data):
        digest = xxhash.xxh3_64_intdigest(data[START:end])
        if START <= end <= len(data) and check == checksum(end, last, whole, digest):
            marks = published(data, end)
            return None if marks is None or last - whole > _STEPS else Trace(whole, last, marks)
    return None


def checksum(end: int, last: int, whole: int, digest: int) -> int:
    """The checksum (xxh3_64) in a state, from its other words and the digest (xxh3_64) of the records."""
    return xxhash.xxh3_64_intdigest(STATE.pack(end, last, whole, digest))


def last_step(path: Path) -> int | None:
    """The last complete step in a trail's file, by its header alone; None where `read_trail` has none."""
    try:
        with open_regular(path) as file:
            states = list(_states(memoryview(file.read(START))))
    except OSError:
        return None
    return states[0][1] if states else None


def _states(data: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """The states in a trail's header, the newer first; none if it is no such header, or another version's."""
    if len(data) >= START and HEADER.unpack_from(data)[:2] == (MAGIC, VERSION):
        found = [STATE.unpack_from(data, at) for at in STATES]
        yield from sorted(found, reverse=True)


def published(data: memoryview, end: int) -> list[Mark] | None:
    """The records up to `end`; None if one is none (after a power cut, pages may be missing)."""
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
