"""Trail: what each step found, kept where SIGKILL cannot take it, for the next start to compare.

One file per segment and rank, beside the journal.  It is only appended to, a frame for each step in one call.
At a boundary, a file of some size makes way for a new one; the one before it stays, and older ones go.  A
power cut may lose the trail: it is never the truth.

    file     magic, frames; what follows the first frame that does not fit its checksum does not count
    frame    checksum of the rest (xxh3_64), last complete step, the step after which all steps are in
             full, size of the records: u64 each; records
    record   step u64, value u64 or f64, epoch u32, count u32, key u32, seq u32, flags u8

Numbers are in the machine's byte order.  A key is a pair (phase, name); the record that defines it is
followed by the pair in JSON, of `count` bytes.

| phase | name | value |
|---|---|---|
| batch | stream | digest of a batch as it was handed out; `epoch` is its pass, `seq` its place in the step |
| pass | stream | none: pass `epoch` of the stream ended, and `step` was the last that drew from the stream |
| copy | phase of a snapshot / part | digest of that part of the state as it was copied |
| step | metric | sum of `count` values collected in the step; or their mean (FOLDED) |
| others | metric | as the journal has it |
"""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from everstep import hazard
from everstep.contracts.metrics import Block
from everstep.durable import remedy
from everstep.record.journal_format import float_bits
from everstep.record.segment_file import segment_path
from everstep.untrusted_files import parse_json, read_regular

ENOUGH = 1 << 22
"""Size of the file, in bytes, after which the next boundary begins a new one."""
LARGEST = 1 << 26
"""Largest size of a file that is read, in bytes."""
ABSENT, KEY, FOLDED = 1, 2, 4
"""Flags of a record: the value is not on the host, or unknown; a key's definition; a mean."""

MAGIC = b"\x89EVT\r\n\x1a\x04"
"""Its last byte is the version of the format and of the digests."""
FRAME = struct.Struct("=4Q")
_CHECK, _BODY = struct.Struct("=Q"), struct.Struct("=3Q")
BITS = struct.Struct("=QQIIIIB")
FLOAT = struct.Struct("=QdIIIIB")
_checksum: Callable[[Any], int] = xxhash.xxh3_64_intdigest


def trail_path(run_dir: Path, segment: int, rank: int = 0) -> Path:
    """Path of a rank's trail of a segment."""
    return segment_path(run_dir, segment).with_suffix(f".rank-{rank:05d}.trail" if rank else ".trail")


def _earlier(path: Path) -> Path:
    """Path of the file that a trail has filled before."""
    return path.with_suffix(".earlier.trail")


# ---------------------------------------------------------------------------------------------- writing


class Trail:
    """Writer of one segment's trail.  Only the training thread calls it.

    If the disk refuses a step's results, the run continues without them; a message says so once.

    Args:
        run_dir: the run directory; its journal folder exists.
        segment: number of this start.
        step: the step that the start resumes from.
        is_wall: whether a metric depends on the clock, by its name: such values are left out.
        warn: takes sentences for the user.
        rank: the rank whose steps are noted.
        reduced: whether the values of a step are known only when those of all ranks are reduced.
    """

    def __init__(
        self,
        run_dir: Path,
        segment: int,
        step: int,
        is_wall: Callable[[str], bool],
        warn: Callable[[str], None],
        *,
        rank: int = 0,
        reduced: bool = False,
    ) -> None:
        self.path = trail_path(run_dir, segment, rank)
        self._is_wall, self._warn = is_wall, warn
        self._host = None if reduced else float
        """Type of the values that a step has on the host."""
        self._keys: dict[tuple[str, str], int] = {}
        """Numbers by (phase, name); 0 is not a key: such records are left out."""
        self._absent: set[str] = set()
        """Metrics that were not on the host at the end of some step."""
        self._records = bytearray()
        """Records that are not in the file yet."""
        self._descriptor: int | None = None
        """None while the file cannot be made."""
        self._end = 0
        self._last = self._whole = self._begun = step
        """The last step; those after which all steps are in both files, and in this file."""
        self._has_warned = False
        self._begin()

    def batch(self, step: int, stream: str, pass_index: int, seq: int, digest: int | None) -> None:
        """Note batch `seq` of `step`; `digest` is None where the batch gives nothing to digest."""
        key = self._keys.get(("batch", stream)) or self._key("batch", stream)
        flags = ABSENT if digest is None else 0
        self._records += BITS.pack(step, digest or 0, pass_index, 1, key, seq, flags)

    def mark(self, step: int, phase: str, name: str, value: int = 0, epoch: int = 0) -> None:
        """Note another value that is compared."""
        key = self._key(phase, name)
        self._records += BITS.pack(step, value, epoch, 1, key, 0, 0)

    def step(
        self,
        step: int,
        epoch: int,
        pending: Sequence[tuple[int, str, Any]],
        read: Mapping[str, tuple[int, float, int]],
    ) -> None:
        """Write what a complete step found.

        Args:
            pending: values collected and not read yet; the last ones are this step's.
            read: name -> (step, sum, count of values) of metrics that were read in the middle of a step.
        """
        self._last = step
        for name, (at, total, count) in read.items():
            if at == step and (key := self._key("step", name)):
                self._records += FLOAT.pack(step, total, epoch, count, key, 0, 0)
        first = len(pending)
        while first and pending[first - 1][0] == step:
            first -= 1
        for _, name, value in pending[first:]:
            key = self._keys.get(("step", name)) or self._key("step", name)
            # a tensor may be on a device: reading its value would make the step wait
            on_host = type(value) is self._host
            if not on_host:
                self._absent.add(name)
            if key:
                number, flags = (value, 0) if on_host else (0.0, ABSENT)
                self._records += FLOAT.pack(step, number, epoch, 1, key, 0, flags)
        self._write()

    def rows(self, block: Block) -> None:
        """Write rows that were read, if `step` has not seen them, or not on the host."""
        folded = block.phase == "step"
        if block.wall or (folded and block.name not in self._absent):
            return
        if key := self._key(block.phase, block.name):
            flags, bits = FOLDED if folded else 0, float_bits(block.values)
            for step, value, count, seq in zip(block.steps, bits, block.counts, block.seqs, strict=True):
                self._records += BITS.pack(step, value, block.epoch, count, key, seq, flags)
        self._write()

    def boundary(self) -> None:
        """Note that everything so far is read: a file that is large, or could not be made, is begun anew."""
        if self._descriptor is None or self._end > ENOUGH:
            self._write()
            self._begin()

    def close(self) -> None:
        """Let go of the file.  May be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def _key(self, phase: str, name: str) -> int:
        """Return the number of a key, and define a new key; 0 for a metric that depends on the clock."""
        key = self._keys.get((phase, name))
        if key is None:
            key = 0 if phase == "step" and self._is_wall(name) else len(self._keys) + 1
            self._keys[phase, name] = key
            text = json.dumps([phase, name]).encode()
            self._records += BITS.pack(0, 0, 0, len(text), key, 0, KEY) + text
        return key

    def _write(self) -> None:
        """Append the records; those that the disk refuses are lost, with the keys that they define."""
        body = _BODY.pack(self._last, self._whole, len(self._records)) + self._records
        self._records.clear()
        if self._descriptor is not None:
            try:
                self._append(_CHECK.pack(_checksum(body)) + body)
                return
            except OSError as error:
                self._refused(error)
        self._whole = self._last
        self._keys.clear()

    def _append(self, data: bytes) -> None:
        hazard.reach("trail.write")
        assert self._descriptor is not None
        if os.pwrite(self._descriptor, data, self._end) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._end += len(data)

    def _begin(self) -> None:
        """Begin a new file; the one that this start has filled makes way for it."""
        filled = self._descriptor is not None
        self.close()
        self._keys.clear()
        self._whole, self._begun = max(self._whole, self._begun), self._last
        try:
            hazard.reach("trail.rename")
            with suppress(FileNotFoundError):  # a person may delete it
                if filled:
                    self.path.replace(_earlier(self.path))
                else:  # of a start whose journal was lost, or what a link leads to elsewhere
                    self.path.unlink()
            hazard.reach("trail.create")
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._descriptor, self._end = os.open(self.path, flags, 0o666), 0
            self._append(MAGIC)
            self._write()
        except OSError as error:
            self.close()
            self._refused(error)

    def _refused(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"{self.path}: {error.strerror}; {remedy(error)}: until it can be written again, the results "
                "of steps do not survive a kill; a resume can compare only what the journal has been given"
            )


# ---------------------------------------------------------------------------------------------- reading


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
    """Read a trail; None if it is missing, damaged or of another version."""
    marks: list[Mark] = []
    floor, whole, last = 0, 0, -1
    for file in (_earlier(path), path):
        keys: dict[int, tuple[str, str]] = {}
        try:
            for number, (after, since, records) in enumerate(_frames(file)):
                if number == 0 and after != last:  # the file before is missing, or torn
                    marks.clear()
                    floor = after
                whole, last = max(since, floor), after
                marks.extend(_marks(records, keys))
        except (KeyError, TypeError, ValueError, struct.error):
            return None
    # a forged file may claim more steps than it has frames for
    return None if last < 0 or last - whole > 2 * LARGEST // FRAME.size else TrailContent(whole, last, marks)


def last_step(path: Path) -> int | None:
    """Read the last complete step from a file of a trail; None if it is none."""
    lasts = [last for last, _, _ in _frames(path)]
    return lasts[-1] if lasts else None


def newest_step(run_dir: Path, segment: int) -> int:
    """Read the last complete step of a start from its ranks' trails; 0 without a trail."""
    trails = segment_path(run_dir, segment).parent.glob(f"segment-{segment:04d}*.trail")
    return max((last_step(path) or 0 for path in trails), default=0)


def _frames(path: Path) -> Iterator[tuple[int, int, memoryview]]:
    """Yield (last, whole, records) of the frames until the first that is not whole."""
    try:
        data = memoryview(read_regular(path, LARGEST))
    except OSError:
        return
    begin = len(MAGIC) if data[: len(MAGIC)] == MAGIC else len(data)
    while begin + FRAME.size <= len(data):
        check, last, whole, size = FRAME.unpack_from(data, begin)
        end = begin + FRAME.size + size
        if end > len(data) or check != _checksum(data[begin + _CHECK.size : end]):
            return
        yield last, whole, data[begin + FRAME.size : end]
        begin = end


def _marks(records: memoryview, keys: dict[int, tuple[str, str]]) -> Iterator[Mark]:
    """Yield the records of a frame; take note of the keys that it defines."""
    at = 0
    while at < len(records):
        step, value, epoch, count, key, seq, flags = BITS.unpack_from(records, at)
        at += BITS.size
        if flags & KEY:
            phase, name = parse_json(records[at : at + count])
            keys[key] = (str(phase), str(name))
            at += count
        else:
            yield Mark(step, value, epoch, count, *keys[key], seq, flags)
