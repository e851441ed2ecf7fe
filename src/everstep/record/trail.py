"""Trail: what each step found, kept where SIGKILL cannot take it, for the next start to compare.

One file per segment and rank, beside the journal.  It is only appended to, a frame for each step in one call;
at a boundary, what no resume needs is left behind in a new file.  A power cut may lose the trail: it is never
the truth.

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

import contextlib
import errno
import json
import os
import struct
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from everstep import hazard
from everstep.contracts.metrics import Block
from everstep.durable import remedy, temporary
from everstep.record.journal_format import float_bits
from everstep.record.segment_file import segment_path
from everstep.untrusted_files import parse_json, read_regular

LARGEST = 1 << 26
"""Largest size of the file, in bytes."""
SMALLEST = 1 << 15
"""Size in bytes below which nothing is left behind."""
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


# ---------------------------------------------------------------------------------------------- writing


class Trail:
    """Writer of one segment's trail.  Only the training thread calls it.

    If the disk refuses the file, the run continues without a trail; a message says so once, and each
    boundary tries again.

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
        """None while the file cannot be written."""
        self._end = 0
        self._last = self._whole = step
        self._floors = [step, step]
        self._boundaries: list[tuple[int, int]] = []
        """(step, end of the file then): everything that steps until this one found lies before it."""
        self._is_refused = self._has_warned = False
        self._begin()
        _OPEN.add(self)

    def batch(self, step: int, stream: str, pass_index: int, seq: int, digest: int | None) -> None:
        """Note batch `seq` of `step`; `digest` is None where the batch gives nothing to digest."""
        key = self._keys.get(("batch", stream)) or self._key("batch", stream)
        flags = ABSENT if digest is None else 0
        self._records += BITS.pack(step, digest or 0, pass_index, 1, key, seq, flags)

    def mark(self, step: int, phase: str, name: str, value: int = 0, epoch: int = 0) -> None:
        """Note another value that is compared."""
        self._records += BITS.pack(step, value, epoch, 1, self._key(phase, name), 0, 0)

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

    def committed(self, step: int) -> None:
        """Note a committed checkpoint: records before the previous checkpoint are no longer needed."""
        self._floors = [self._floors[1], step]

    def boundary(self, step: int) -> None:
        """Note that everything until `step` is written, and leave behind what no resume needs."""
        if self._descriptor is None:
            if self._is_refused:
                self._begin()
            return
        self._boundaries.append((step, self._end))
        if self._end < SMALLEST:
            return
        before = [each for each in self._boundaries if each[0] <= self._floors[0]]
        last, cut = max(before, default=(0, 0))
        if cut * 2 < self._end:
            return
        try:
            needed = os.pread(self._descriptor, self._end - cut, cut)
        except OSError as error:
            self._refuse(error)
            return
        self._whole = max(self._whole, last)
        self._begin(needed, [(step, end - cut) for step, end in self._boundaries if end >= cut])

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
            self._records += _definition(key, phase, name)
        return key

    def _write(self) -> None:
        """Append the records; from the first failure until the next boundary there is no file."""
        if self._descriptor is not None:
            try:
                self._append(self._frame())
            except OSError as error:
                self._refuse(error)
        if self._descriptor is None:
            self._whole = self._last
        self._records.clear()

    def _frame(self) -> bytes:
        body = _BODY.pack(self._last, self._whole, len(self._records)) + self._records
        return _CHECK.pack(_checksum(body)) + body

    def _append(self, data: bytes) -> None:
        hazard.reach("trail.write")
        if self._end + len(data) > LARGEST:
            raise OSError(errno.EFBIG, f"it is full at {LARGEST >> 20} MiB")
        assert self._descriptor is not None
        if os.pwrite(self._descriptor, data, self._end) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._end += len(data)

    def _begin(self, frames: bytes = b"", boundaries: Sequence[tuple[int, int]] = ()) -> None:
        """Put a new file with the frames that are needed in the place of the old one."""
        self.close()
        made = temporary(self.path)
        if not frames:
            self._whole = self._last
        try:
            hazard.reach("trail.create")
            made.unlink(
                missing_ok=True
            )  # a killed process with the same pid left it; or a link leads elsewhere
            self._descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            self._end = 0
            self._records[:] = b"".join(_definition(key, *name) for name, key in self._keys.items())
            head = MAGIC + self._frame()
            self._records.clear()
            self._append(head + frames + self._frame())  # the last one says which steps are there in full
            hazard.reach("trail.rename")
            made.replace(self.path)  # last: until then a killed start leaves the old file whole
            self._boundaries = [(step, end + len(head)) for step, end in boundaries]
            self._is_refused = False
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError):
                made.unlink(missing_ok=True)
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        self.close()
        self._is_refused = True
        if not self._has_warned:
            self._has_warned = True
            why = f"{error.strerror}; {remedy(error)}" if isinstance(error, OSError) else error
            self._warn(
                f"{self.path}: {why}: until it can be written again, the results of steps do not survive "
                "a kill; a resume can compare only what the journal has been given"
            )


def _definition(key: int, phase: str, name: str) -> bytes:
    text = json.dumps([phase, name]).encode()
    return BITS.pack(0, 0, 0, len(text), key, 0, KEY) + text


_OPEN: weakref.WeakSet[Trail] = weakref.WeakSet()


def _close_in_child() -> None:  # the file is the parent's
    for trail in _OPEN:
        trail.close()


os.register_at_fork(after_in_child=_close_in_child)

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
    keys: dict[int, tuple[str, str]] = {}
    content = None
    marks: list[Mark] = []
    for last, whole, records in _frames(path):
        try:
            marks.extend(_marks(records, keys))
        except (KeyError, TypeError, ValueError, struct.error):
            return None
        content = TrailContent(whole, last, marks)
    # a forged file may claim more steps than it has frames for
    too_many = content is not None and content.last - content.whole > LARGEST // FRAME.size
    return None if too_many else content


def last_step(path: Path) -> int | None:
    """Read the last complete step from a trail; None if it is no trail."""
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
