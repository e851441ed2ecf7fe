"""The trail: what each step found, kept where SIGKILL cannot take it, for the next start to compare.

One memory-mapped file per segment, beside its journal.  A step writes into it without a system call: the
kernel has the bytes, whatever becomes of the process.  A power cut may lose it; it is never the truth.

    header   magic (8 bytes), version u32, segment u32, then words of 8 bytes: where the published records
             end, the last complete step, the step after which nothing found no room
    record   step u64, value u64 or f64, epoch u32, count u32, key u16, seq u16, flags u32 (32 bytes)

Numbers are in the machine's byte order.  A record counts once it is published, whole steps at a time.  A
key is a pair (phase, name); a record defines it before the first that uses it, and its text follows.

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
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from everstep import hazard
from everstep.durable import temporary
from everstep.record.frames import Block, float_bits
from everstep.record.reading import segment_path
from everstep.regular import open_regular, read_regular

VERSION = 1
SMALLEST, LARGEST = 1 << 18, 1 << 26
"""Bytes of the file: at first, and at most."""

ABSENT, KEY, FOLDED = 1, 2, 4
"""Flags: the value is not on the host, or cannot be told; a key's definition; a mean."""

_MAGIC = b"\x89EVT\r\n\x1a\n"
_HEADER = struct.Struct("=8sII")
_BITS = struct.Struct("=QQIIHHI")
_FLOAT = struct.Struct("=QdIIHHI")
_SIZE = _BITS.size
_START = 64
_PUBLISHED, _STEP, _WHOLE = 2, 3, 4  # words of the header
_KEYS = 1 << 16
_LAST_SEQ = (1 << 16) - 1


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


class Trail:
    """The writer of one segment's trail.  Only the training thread calls it.

    Where the disk refuses it, or has no memory mapping, the run goes on without, which is said once.

    Args:
        run_dir: the run directory; its folder of the journal is there.
        segment: number of this start.
        step: the step that it goes on from.
        is_wall: whether a metric depends on the clock, by its name: such values are left out.
        warn: takes sentences for the user.
    """

    def __init__(
        self,
        run_dir: Path,
        segment: int,
        step: int,
        is_wall: Callable[[str], bool],
        warn: Callable[[str], None],
    ) -> None:
        self.path = trail_path(run_dir, segment)
        self._segment, self._is_wall, self._warn = segment, is_wall, warn
        self._keys: dict[tuple[str, str], int] = {}
        """0 is no key: such records are left out."""
        self._texts: dict[tuple[str, str], bytes] = {}
        """Of the keys that this file was asked for, whether they found room or not."""
        self._absent: set[str] = set()
        """Metrics that were not on the host at the end of some step."""
        self._memory: mmap.mmap | None = None
        self._at = self._end = 0
        self._whole, self._floors = step, [step, step]
        self._make(SMALLEST, step, [])
        _OPEN.add(self)

    # ------------------------------------------------------------------------------ the steps

    def batch(self, step: int, stream: str, pass_index: int, seq: int, digest: int | None) -> None:
        """Batch `seq` of `step` is handed out; `digest` is None where nothing of it can be told."""
        if seq > _LAST_SEQ:
            self._lacks(step)
        elif key := self._key(step, "batch", stream):
            flags = ABSENT if digest is None else 0
            self._write(_BITS, step, digest or 0, pass_index, 1, key, seq, flags)

    def mark(self, step: int, phase: str, name: str, value: int = 0, epoch: int = 0) -> None:
        """Note something else that is compared."""
        if key := self._key(step, phase, name):
            self._write(_BITS, step, value, epoch, 1, key, 0, 0)

    def step(
        self,
        step: int,
        epoch: int,
        pending: Sequence[tuple[int, str, Any]],
        read: Mapping[str, tuple[int, float, int]],
    ) -> None:
        """A step is complete: publish what it found.

        Args:
            pending: values collected and not read yet; those of this step are the last.
            read: of metrics that were read in the middle of a step: the step, sum and number of values.
        """
        if self._memory is None:
            return
        for name, (at, total, count) in read.items():
            if at == step:
                self._value(step, epoch, name, total, count, 0)
        first = len(pending)
        while first and pending[first - 1][0] == step:
            first -= 1
        for _, name, value in pending[first:]:
            if type(value) is float:
                self._value(step, epoch, name, value, 1, 0)
            else:
                self._absent.add(name)
                self._value(step, epoch, name, 0.0, 1, ABSENT)
        words = self._words
        words[_PUBLISHED] = self._at
        words[_STEP] = step  # last: it may be one behind, and never ahead

    def rows(self, block: Block) -> None:
        """Rows were read: note those that `step` has not seen, or not on the host."""
        folded = block.phase == "step"
        if self._memory is None or block.wall or (folded and block.name not in self._absent):
            return
        if key := self._key(block.steps[-1], block.phase, block.name):
            flags, bits = FOLDED if folded else 0, float_bits(block.values)
            for step, value, count, seq in zip(block.steps, bits, block.counts, block.seqs, strict=True):
                if seq <= _LAST_SEQ:
                    self._write(_BITS, step, value, block.epoch, count, key, seq, flags)
        self._words[_PUBLISHED] = self._at

    def _value(self, step: int, epoch: int, name: str, value: float, count: int, flags: int) -> None:
        key = self._keys.get(("step", name))
        if key is None:
            key = self._key(step, "step", name)
        if key:
            self._write(_FLOAT, step, value, epoch, count, key, 0, flags)

    def _write(self, kind: struct.Struct, step: int, *values: Any) -> None:
        if self._at < self._end:
            kind.pack_into(self._view, self._at, step, *values)
            self._at += _SIZE
        else:
            self._lacks(step)

    def _lacks(self, step: int) -> None:
        """Something of this step found no room: of the steps until it not all is there."""
        if self._memory is not None:
            self._words[_WHOLE] = self._whole = max(self._whole, step)

    def _key(self, step: int, phase: str, name: str) -> int:
        """The number of a key, defined in the file if it is new; 0 if it has none."""
        found = self._keys.get((phase, name))
        if found is not None or self._memory is None:
            return found or 0
        if phase == "step" and self._is_wall(name):
            self._keys[phase, name] = 0
            return 0
        text = self._texts.get((phase, name))
        if text is None:
            text = self._texts[phase, name] = json.dumps([phase, name]).encode()
        if self._at + _definition(text) > self._end or len(self._keys) >= _KEYS - 1:
            self._lacks(step)
            return 0
        key = self._keys[phase, name] = len(self._keys) + 1
        self._write(_BITS, 0, 0, 0, len(text), key, 0, KEY)
        room = _definition(text) - _SIZE
        self._view[self._at : self._at + room] = text.ljust(room)
        self._at += room
        return key

    # --------------------------------------------------------------------------- the boundaries

    def committed(self, step: int) -> None:
        """A checkpoint is committed: what lies before the one before it is not needed any more."""
        self._floors = [self._floors[1], step]

    def tidy(self) -> None:
        """At a boundary: make room, if half of it is used."""
        if self._memory is None or (self._at - _START) * 2 < self._end - _START:
            return
        marks = [mark for mark in _marks(self._view, self._at) or () if mark.step > self._floors[0]]
        size = SMALLEST
        needed = len(marks) * _SIZE + sum(map(_definition, self._texts.values()))
        while size < LARGEST and needed * 4 > size:
            size *= 2
        if needed * 2 > size:
            self._warn(
                f"{self.path} is full at {LARGEST >> 20} MiB: of the steps since the last checkpoint only "
                "the newest can be compared after a kill; save more often for all of them"
            )
            self._whole, marks = self._words[_STEP], []
        self._whole = max(self._whole, self._floors[0])
        last = self._words[_STEP]
        self._let_go()
        self._make(size, last, marks)

    def close(self) -> None:
        """Let go of the file, and of what it has too much.  May be called twice."""
        if self._memory is not None:
            self._let_go(end=self._at)

    def forget(self) -> None:
        """In a forked child: the file is the parent's."""
        if self._memory is not None:
            os.close(self._fd)
        self._memory, self._end = None, 0

    def _let_go(self, end: int | None = None) -> None:
        if self._memory is not None:
            self._words.release()
            self._view.release()
            self._memory.close()
            if end is not None:
                with contextlib.suppress(OSError):  # not by its path: another file may stand there by now
                    os.ftruncate(self._fd, end)
        self.forget()

    def _make(self, size: int, last: int, marks: Sequence[Mark]) -> None:
        """A new file with these marks, in the place of the old one."""
        made = temporary(self.path)
        try:
            self._map(made, size)
            _HEADER.pack_into(self._view, 0, _MAGIC, VERSION, self._segment)
            self._keys.clear()
            self._texts.clear()
            for mark in marks:
                if key := self._key(mark.step, mark.phase, mark.name):
                    self._write(_BITS, *mark[:4], key, mark.seq, mark.flags)
            words = self._words
            words[_WHOLE], words[_STEP], words[_PUBLISHED] = self._whole, last, self._at
            made.replace(self.path)
        except (OSError, ValueError) as error:
            self._let_go()
            with contextlib.suppress(OSError):
                made.unlink(missing_ok=True)
            self._warn(
                f"{self.path}: {getattr(error, 'strerror', None) or error}: what the steps find is not kept "
                "for a kill; a resume can compare only what the journal has been given"
            )

    def _map(self, path: Path, size: int) -> None:
        hazard.reach("trail.create")
        path.unlink(missing_ok=True)  # of a killed process with our number; or a link, which leads elsewhere
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            if os.pwrite(descriptor, bytes(size), 0) < size:  # writing to a hole, the disk full, is SIGBUS
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._memory = mmap.mmap(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        self._fd = descriptor
        self._view = memoryview(self._memory)
        self._words = self._view.cast("Q")
        self._at, self._end = _START, size


def _definition(text: bytes) -> int:
    """Bytes of a key's definition."""
    return _SIZE + -(-len(text) // _SIZE) * _SIZE


_OPEN: weakref.WeakSet[Trail] = weakref.WeakSet()


def _forget_in_child() -> None:
    for trail in _OPEN:
        trail.forget()


os.register_at_fork(after_in_child=_forget_in_child)


# ----------------------------------------------------------------------------------------- reading


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
    words = _header(data)
    if words is None or words[_PUBLISHED] > len(data):
        return None
    marks = _marks(data, words[_PUBLISHED])
    return None if marks is None else Trace(words[_WHOLE], words[_STEP], marks)


def last_step(path: Path) -> int | None:
    """The last complete step in a trail's file, by its header alone; None where `read_trail` has none."""
    try:
        with open_regular(path) as file:
            words = _header(memoryview(file.read(_START)))
    except OSError:
        return None
    return None if words is None else int(words[_STEP])


def _header(data: memoryview) -> memoryview | None:
    """The words of a trail's header; None if it is none, or another version's."""
    if len(data) < _START:
        return None
    magic, version, _ = _HEADER.unpack_from(data)
    words = data[:_START].cast("Q")
    return words if (magic, version) == (_MAGIC, VERSION) and words[_PUBLISHED] >= _START else None


def _marks(data: memoryview, end: int) -> list[Mark] | None:
    """The records up to `end`; None if one is none (after a power cut, pages may be missing)."""
    keys: dict[int, tuple[str, str]] = {}
    marks = []
    at = _START
    while at + _SIZE <= end:
        step, value, epoch, count, key, seq, flags = _BITS.unpack_from(data, at)
        at += _SIZE
        if flags & KEY:
            try:
                phase, name = json.loads(bytes(data[at : at + count]))
            except ValueError:
                return None
            keys[key] = (str(phase), str(name))
            at += -(-count // _SIZE) * _SIZE
        elif key in keys:
            marks.append(Mark(step, value, epoch, count, *keys[key], seq, flags))
        else:
            return None
    return marks
