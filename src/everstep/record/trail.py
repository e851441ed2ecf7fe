"""Trail: the values that each step found, kept where SIGKILL cannot take them, for the next start to compare.

One file per segment, beside its journal.  The file is memory-mapped, so a step writes into it without a
system call: the kernel has the bytes even if the process is killed.  A power cut may lose the trail; it is
never the truth.

Where a file system gives each written page a new place (Btrfs), or asks a server, writing to a mapping of a
full disk is SIGBUS, which ends the process.  There, two calls write a step.

`trail_file` has the format of the file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import struct
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from everstep import hazard
from everstep.contracts.metrics import Block
from everstep.durable import remedy, temporary
from everstep.record.journal_format import float_bits
from everstep.record.trail_format import (
    ABSENT,
    BITS,
    FLOAT,
    FOLDED,
    HEADER,
    KEY,
    LARGEST,
    MAGIC,
    SIZE,
    START,
    STATE,
    STATES,
    VERSION,
    definition,
    trail_path,
)

SMALLEST = 1 << 18
"""Bytes of a new file."""
_OVERWRITING = {0xEF53, 0x58465342, 0x01021994}
"""Linux's numbers of the file systems that overwrite a file's page in place: ext2 to ext4, XFS, tmpfs."""
_KEYS = 1 << 16
_hash: Callable[[bytes], int] = xxhash.xxh3_64_intdigest
_LAST_SEQ = (1 << 16) - 1


class _Kept(NamedTuple):
    """Part of a trail that goes into the next file; key n of the records is the n-th name, from 1."""

    names: list[tuple[str, str]]
    records: bytes


_NOTHING = _Kept([], b"")
_ROW = np.dtype("=u8, =u8, =u4, =u4, =u2, =u2, =u4")
_ROW.names = ("step", "value", "epoch", "count", "key", "seq", "flags")
"""A record, as `trail_format.BITS` packs it."""


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
        self._segment, self._is_wall, self._warn = segment, is_wall, warn
        self._host = None if reduced else float
        """Type of the values that a step has on the host."""
        self._keys: dict[tuple[str, str], int] = {}
        """Numbers by (phase, name); 0 is not a key: such records are left out."""
        self._texts: dict[tuple[str, str], bytes] = {}
        """JSON by (phase, name), for all keys of this file, including those without room in it."""
        self._definitions: list[tuple[int, int]] = []
        """Where the file has definitions of keys: first byte, and the byte after the last."""
        self._absent: set[str] = set()
        """Metrics that were not on the host at the end of some step."""
        self._memory: mmap.mmap | bytearray | None = None
        self._at = self._end = self._written = self._sealed = self._turn = 0
        self._last = self._whole = step
        self._floors = [step, step]
        self._refused = self._said = self._is_mapped = False
        """_refused: the file cannot be written, and each boundary tries again; _said: a message said so."""
        self._make(SMALLEST, _NOTHING)
        _OPEN.add(self)

    # ------------------------------------------------------------------------------ the steps

    def batch(self, step: int, stream: str, pass_index: int, seq: int, digest: int | None) -> None:
        """Note batch `seq` of `step`; `digest` is None where the batch gives nothing to digest."""
        key = self._keys.get(("batch", stream))
        # each step comes here: the usual case makes no further call
        if key and digest is not None and seq <= _LAST_SEQ and self._at < self._end:
            BITS.pack_into(self._view, self._at, step, digest, pass_index, 1, key, seq, 0)
            self._at += SIZE
        elif seq > _LAST_SEQ:
            self._lacks(step)
        elif key := self._key(step, "batch", stream):
            flags = ABSENT if digest is None else 0
            self._write(BITS, step, digest or 0, pass_index, 1, key, seq, flags)

    def mark(self, step: int, phase: str, name: str, value: int = 0, epoch: int = 0) -> None:
        """Note another value that is compared."""
        if key := self._key(step, phase, name):
            self._write(BITS, step, value, epoch, 1, key, 0, 0)

    def step(
        self,
        step: int,
        epoch: int,
        pending: Sequence[tuple[int, str, Any]],
        read: Mapping[str, tuple[int, float, int]],
    ) -> None:
        """Publish the values of a complete step.

        Args:
            pending: values collected and not read yet; the last ones are this step's.
            read: name -> (step, sum, count of values) of metrics that were read in the middle of a step.
        """
        self._last = step
        if self._memory is None:
            return
        if read or (pending and pending[-1][0] == step):
            self._values(step, epoch, pending, read)
        self._publish()

    def _values(
        self,
        step: int,
        epoch: int,
        pending: Sequence[tuple[int, str, Any]],
        read: Mapping[str, tuple[int, float, int]],
    ) -> None:
        """Note the metrics of a step."""
        for name, (at, total, count) in read.items():
            if at == step and (key := self._key(step, "step", name)):
                self._write(FLOAT, step, total, epoch, count, key, 0, 0)
        first = len(pending)
        while first and pending[first - 1][0] == step:
            first -= 1
        for _, name, value in pending[first:]:
            known = self._keys.get(("step", name))
            # the usual case without a further call, as in `batch`
            if type(value) is self._host and known and self._at < self._end:
                FLOAT.pack_into(self._view, self._at, step, value, epoch, 1, known, 0, 0)
                self._at += SIZE
                continue
            # a tensor may be on a device: reading its value would make the step wait
            flags = 0 if type(value) is self._host else ABSENT
            if flags:
                self._absent.add(name)
            if key := self._key(step, "step", name):
                self._write(FLOAT, step, 0.0 if flags else value, epoch, 1, key, 0, flags)

    def rows(self, block: Block) -> None:
        """Note rows that were read, if `step` has not seen them, or not on the host."""
        folded = block.phase == "step"
        if self._memory is None or block.wall or (folded and block.name not in self._absent):
            return
        if key := self._key(block.steps[-1], block.phase, block.name):
            flags, bits = FOLDED if folded else 0, float_bits(block.values)
            for step, value, count, seq in zip(block.steps, bits, block.counts, block.seqs, strict=True):
                if seq <= _LAST_SEQ:
                    self._write(BITS, step, value, block.epoch, count, key, seq, flags)
        self._publish()

    def _publish(self) -> None:
        """Publish the records in the older of the two states: after a kill inside, the other state counts."""
        # without a call of `checksum`: each step comes here
        at, last, whole, view = self._at, self._last, self._whole, self._view
        self._digest.update(view[self._sealed : at])
        self._sealed, self._turn = at, 1 - self._turn
        check = _hash(STATE.pack(at, last, whole, self._digest.intdigest()))
        STATE.pack_into(view, STATES[self._turn], at, last, whole, check)
        if not self._is_mapped:
            try:
                self._write_out()
            except OSError as error:  # the next step tries again, with this step's records
                self._warn_of(error)

    def _write_out(self) -> None:
        """Write the new records to the file first, then the header, which makes them count."""
        hazard.reach("trail.write")
        for start, end in ((self._written, self._at), (0, START)):
            if os.pwrite(self._fd, self._view[start:end], start) < end - start:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._written = self._at

    def _write(self, kind: struct.Struct, step: int, *values: Any) -> None:
        if self._at < self._end:
            kind.pack_into(self._view, self._at, step, *values)
            self._at += SIZE
        else:
            self._lacks(step)

    def _lacks(self, step: int) -> None:
        """Note that a record of this step found no room: the trail is incomplete up to this step."""
        if self._memory is not None:
            self._whole = max(self._whole, step)

    def _key(self, step: int, phase: str, name: str) -> int:
        """Return the number of a key, and define a new key in the file; 0 if the key has no number."""
        found = self._keys.get((phase, name))
        if found is not None or self._memory is None:
            return found or 0
        if phase == "step" and self._is_wall(name):
            self._keys[phase, name] = 0
            return 0
        text = self._texts.get((phase, name))
        if text is None:
            text = self._texts[phase, name] = json.dumps([phase, name]).encode()
        if self._at + definition(text) > self._end or len(self._keys) >= _KEYS - 1:
            self._lacks(step)
            return 0
        key = self._keys[phase, name] = len(self._keys) + 1
        self._write(BITS, 0, 0, 0, len(text), key, 0, KEY)
        room = definition(text) - SIZE
        self._view[self._at : self._at + room] = text.ljust(room)
        self._at += room
        self._definitions.append((self._at - definition(text), self._at))
        return key

    # --------------------------------------------------------------------------- the boundaries

    def committed(self, step: int) -> None:
        """Note a committed checkpoint: records before the previous checkpoint are no longer needed."""
        self._floors = [self._floors[1], step]

    def tidy(self) -> None:
        """Make room, at a boundary, if half of the file is used; make the file again if it is gone."""
        if self._memory is None:
            if self._refused:
                self._whole = self._last
                self._make(SMALLEST, _NOTHING)
            return
        is_whole, has_name = self._look()
        if is_whole and has_name and (self._at - START) * 2 < self._end - START:
            return
        kept = self._needed() if is_whole else _NOTHING
        size = SMALLEST
        needed = len(kept.records) + sum(map(definition, self._texts.values()))
        while size < LARGEST and needed * 4 > size:
            size *= 2
        if needed * 2 > size:
            self._warn(
                f"{self.path} is full at {LARGEST >> 20} MiB: of the steps since the last checkpoint only "
                "the newest can be compared after a kill; save more often for all of them"
            )
            self._whole, kept = self._last, _NOTHING
        self._whole = max(self._whole, self._floors[0] if is_whole else self._last)
        self._let_go()
        self._make(size, kept)

    def _look(self) -> tuple[bool, bool]:
        """Whether the file still has all bytes, and a name; reading a mapping of missing bytes is SIGBUS."""
        size = self._written if isinstance(self._memory, bytearray) else self._end
        try:
            found = os.fstat(self._fd)
        except OSError:
            return False, False
        return found.st_size >= size, found.st_nlink > 0

    def _needed(self) -> _Kept:
        """Copy the records that the next start may compare with.

        As arrays: after 2,000 quick steps a loop over the records would cost as much as 100 steps.
        """
        rows = np.frombuffer(self._view[START : self._at], _ROW)
        kept = rows["step"] > self._floors[0]
        for first, end in self._definitions:
            kept[(first - START) // SIZE : (end - START) // SIZE] = False
        names = {number: name for name, number in self._keys.items() if number}
        kept &= np.isin(rows["key"], list(names))  # somebody else may have written into the file
        records = rows[kept]
        used, numbers = np.unique(records["key"], return_inverse=True)
        records["key"] = numbers + 1  # a name that no record has any more loses its number
        return _Kept([names[number] for number in used.tolist()], records.tobytes())

    def close(self) -> None:
        """Let go of the file, and cut off its unused bytes.  May be called twice."""
        if self._memory is not None:
            self._let_go(end=self._at)

    def forget(self) -> None:
        """Let go of the file without a change, as in a forked child: the file is the parent's."""
        if self._memory is not None:
            os.close(self._fd)
        self._memory, self._end, self._refused = None, 0, False

    def _let_go(self, end: int | None = None) -> None:
        if self._memory is not None:
            self._view.release()
            if isinstance(self._memory, mmap.mmap):
                self._memory.close()
                if end is not None:
                    # Not by its path: another file may have the name by now.
                    with contextlib.suppress(OSError):
                        hazard.reach("trail.truncate")
                        os.ftruncate(self._fd, end)
        self.forget()

    def _make(self, size: int, kept: _Kept) -> None:
        """Make a new file with these records, and put it in the place of the old file."""
        made = temporary(self.path)
        try:
            self._open(made, size)
            HEADER.pack_into(self._view, 0, MAGIC, VERSION, self._segment)
            self._keys.clear()
            self._texts.clear()
            self._definitions.clear()
            for phase, name in kept.names:
                self._key(self._last, phase, name)
            self._view[self._at : self._at + len(kept.records)] = kept.records
            self._at += len(kept.records)
            self._publish()
            if isinstance(self._memory, bytearray):
                self._write_out()
            hazard.reach("trail.rename")
            made.replace(self.path)  # last: until then a killed start leaves the old file whole
            self._refused = False
        except (OSError, ValueError) as error:
            self._let_go()
            self._refused = True
            with contextlib.suppress(OSError):
                made.unlink(missing_ok=True)
            self._warn_of(error)

    def _warn_of(self, error: Exception) -> None:
        if not self._said:
            self._said = True
            why = f"{error.strerror}; {remedy(error)}" if isinstance(error, OSError) else error
            self._warn(
                f"{self.path}: {why}: until it can be written again, the results of steps do not survive "
                "a kill; a resume can compare only what the journal has been given"
            )

    def _open(self, path: Path, size: int) -> None:
        hazard.reach("trail.create")
        path.unlink(missing_ok=True)  # a killed process with the same pid left it; or a link leads elsewhere
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            self._is_mapped = _overwrites(descriptor)
            self._memory = self._map(descriptor, size) if self._is_mapped else bytearray(size)
        except BaseException:
            os.close(descriptor)
            raise
        self._fd = descriptor
        self._view = memoryview(self._memory)
        self._digest = xxhash.xxh3_64()
        self._sealed, self._turn = START, 0
        self._at, self._end = START, size
        self._written = 0

    def _map(self, descriptor: int, size: int) -> mmap.mmap:
        if os.pwrite(descriptor, bytes(size), 0) < size:  # writing to a hole on a full disk would be SIGBUS
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return mmap.mmap(descriptor, size)


def _overwrites(descriptor: int) -> bool:
    """Whether the file system is known to overwrite a page in place: a full disk cannot refuse that."""
    if sys.platform != "linux":
        return False
    import ctypes

    found = ctypes.create_string_buffer(256)  # twice the size of struct statfs, which begins with the number
    refused = ctypes.CDLL(None).fstatfs(descriptor, found)
    return not refused and int.from_bytes(found.raw[: struct.calcsize("l")], sys.byteorder) in _OVERWRITING


_OPEN: weakref.WeakSet[Trail] = weakref.WeakSet()


def _forget_in_child() -> None:
    for trail in _OPEN:
        trail.forget()


os.register_at_fork(after_in_child=_forget_in_child)
