"""Trail: what each step found, kept where SIGKILL cannot take it, for the next start to compare.

One file per segment and rank, beside the journal.  It is only appended to, a line for each step in one call.
At a boundary, a file of some size makes way for a new one; the one before it stays, and older ones go.  A
power cut may lose the trail: it is never the truth.

A line has the checksum of what follows it (xxh3_64 in 16 hex digits, seeded with `VERSION`), a blank, and JSON:

    [last complete step, the step after which all steps are in full, [[step, phase, name, epoch, seq, value, count] ...]]

What follows the first line that does not fit its checksum does not count.  A value is a digest, or the bits of a
float64; null where it is on a device, or not known.

| phase | name | value |
|---|---|---|
| batch | stream | digest of a batch as it was handed out; `count` is its pass, `seq` its place in the step |
| pass | stream | none: pass `epoch` of the stream ended, and `step` was the last that drew from the stream |
| copy | phase of a snapshot / part | digest of that part of the state as it was copied |
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
from everstep.untrusted_files import is_count, parse_json, read_regular

VERSION = 5
"""Version of the lines and of the digests in them."""
ENOUGH = 1 << 22
"""Size of the file, in bytes, after which the next boundary begins a new one."""
LARGEST = 1 << 26
"""Largest size of a file that is read, in bytes."""
ABSENT = 1
"""Flag of a mark whose value is not known."""

_FLOAT, _BITS = struct.Struct("=d"), struct.Struct("=Q")


def trail_path(run_dir: Path, segment: int, rank: int = 0) -> Path:
    """Path of a rank's trail of a segment."""
    return segment_path(run_dir, segment).with_suffix(f".rank-{rank:05d}.trail" if rank else ".trail")


def _earlier(path: Path) -> Path:
    """Path of the file that a trail has filled before."""
    return path.with_suffix(".earlier.trail")


def packed(body: bytes) -> bytes:
    """Make a line of its JSON."""
    return b"%s %s\n" % (xxhash.xxh3_64_hexdigest(body, VERSION).encode(), body)


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
        self._on_host = None if reduced else float
        """Type of the values that a step has on the host."""
        self._names: dict[tuple[str, str], str] = {}
        """(phase, name) -> both as JSON; "" for a metric that depends on the clock."""
        self._absent: set[str] = set()
        """Metrics that were not on the host at the end of some step."""
        self._records: list[str] = []
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
        self._note(step, "batch", stream, 0, seq, digest, pass_index)

    def mark(self, step: int, phase: str, name: str, value: int = 0, epoch: int = 0) -> None:
        """Note another value that is compared."""
        self._note(step, phase, name, epoch, 0, value, 1)

    def step(
        self,
        step: int,
        epoch: int,
        pending: Sequence[tuple[int, str, Any]],
        read: Mapping[str, tuple[int, float, int]],
    ) -> None:
        """Write what a complete step found; its values are folded as the collector folds them.

        Args:
            pending: values collected and not read yet; the last ones are this step's.
            read: name -> (step, sum, count of values) of metrics that were read in the middle of a step.
        """
        self._last = step
        sums: dict[str, tuple[float, int] | None]
        sums = {name: (total, count) for name, (at, total, count) in read.items() if at == step}
        first = len(pending)
        while first and pending[first - 1][0] == step:
            first -= 1
        for _, name, value in pending[first:]:
            before = sums.get(name, (-0.0, 0))  # the sum of -0.0 and a value is that value
            if type(value) is self._on_host and before is not None:
                sums[name] = (before[0] + value, before[1] + 1)
            else:  # a tensor may be on a device: reading its value would make the step wait
                sums[name] = None
                self._absent.add(name)
        for name, total in sums.items():
            if total is None:
                self._note(step, "step", name, epoch, 0, None, 1)
            else:
                bits = _BITS.unpack(_FLOAT.pack(total[0] / total[1]))[0]
                self._note(step, "step", name, epoch, 0, bits, total[1])
        self._write()

    def rows(self, block: Block) -> None:
        """Write rows that were read, if `step` has not seen them, or not on the host."""
        if block.wall or (block.phase == "step" and block.name not in self._absent):
            return
        columns = zip(block.steps, float_bits(block.values), block.counts, block.seqs, strict=True)
        for step, value, count, seq in columns:
            self._note(step, block.phase, block.name, block.epoch, seq, value, count)
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

    def _note(
        self, step: int, phase: str, name: str, epoch: int, seq: int, value: int | None, count: int
    ) -> None:
        names = self._names.get((phase, name))
        if names is None:
            is_left_out = phase == "step" and self._is_wall(name)
            names = self._names[phase, name] = "" if is_left_out else json.dumps([phase, name])[1:-1]
        if names:  # as json.dumps would write it, in half the time: each step comes here
            known = "null" if value is None else value
            self._records.append(f"[{step},{names},{epoch},{seq},{known},{count}]")

    def _write(self) -> None:
        """Append the records; those that the disk refuses are lost."""
        line = packed(f"[{self._last},{self._whole},[{','.join(self._records)}]]".encode())
        self._records.clear()
        if self._descriptor is not None:
            try:
                hazard.reach("trail.write")
                if os.pwrite(self._descriptor, line, self._end) == len(line):
                    self._end += len(line)
                    return
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                self._refused(error)
        self._whole = self._last

    def _begin(self) -> None:
        """Begin a new file; the one that this start has filled makes way for it."""
        is_filled = self._descriptor is not None
        self.close()
        self._whole, self._begun = max(self._whole, self._begun), self._last
        try:
            hazard.reach("trail.rename")
            with suppress(FileNotFoundError):  # a person may delete it
                if is_filled:
                    self.path.replace(_earlier(self.path))
                else:  # of a start whose journal was lost, or what a link leads to elsewhere
                    self.path.unlink()
            hazard.reach("trail.create")
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._descriptor, self._end = os.open(self.path, flags, 0o666), 0
        except OSError as error:
            self._refused(error)
        self._write()

    def _refused(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"{self.path}: {error.strerror}; {remedy(error)}: until it can be written again, the results "
                "of steps do not survive a kill; a resume can compare only what the journal has been given"
            )


class Mark(NamedTuple):
    """Record of a trail; `value` is a digest or the bits of a number, None where it is not known."""

    step: int
    phase: str
    name: str
    epoch: int
    seq: int
    value: int | None
    count: int  # type: ignore[assignment]  # as in Row

    @property
    def flags(self) -> int:
        return ABSENT if self.value is None else 0


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
    floor, whole, last, size = 0, 0, -1, 0
    for file in (_earlier(path), path):
        try:
            for number, body in enumerate(_bodies(file)):
                after, since, records = parse_json(body)
                if not (is_count(after) and is_count(since)):
                    return None
                if number == 0 and after != last:  # the file before is missing, or torn
                    marks.clear()
                    floor = after
                whole, last, size = max(since, floor), after, size + 1
                marks += map(_mark, records)
        except (TypeError, ValueError):
            return None
    # a forged file may claim more steps than it has lines for
    return None if last < 0 or last - whole > size else TrailContent(whole, last, marks)


def _mark(record: Sequence[Any]) -> Mark:
    mark = Mark(*record)
    numbers = (mark.step, mark.epoch, mark.seq, mark.count)
    value = 0 if mark.value is None else mark.value
    is_value = isinstance(value, int) and 0 <= value < 1 << 64
    if not (all(map(is_count, numbers)) and is_value and type(mark.phase) is type(mark.name) is str):
        raise ValueError("it is not a mark")
    return mark


def last_step(path: Path) -> int | None:
    """Read the last complete step from a file of a trail; None if it is none."""
    bodies = list(_bodies(path))
    try:
        last = parse_json(bodies[-1])[0] if bodies else None
    except (LookupError, TypeError, ValueError):
        return None
    return last if is_count(last) else None


def newest_step(run_dir: Path, segment: int) -> int:
    """Read the last complete step of a start from its ranks' trails; 0 without a trail."""
    trails = segment_path(run_dir, segment).parent.glob(f"segment-{segment:04d}*.trail")
    return max((last_step(path) or 0 for path in trails), default=0)


def _bodies(path: Path) -> Iterator[bytes]:
    """Yield the JSON of the lines until the first that is not whole."""
    try:
        lines = read_regular(path, LARGEST).split(b"\n")[:-1]
    except OSError:
        return
    for line in lines:
        body = line[17:]
        if packed(body)[:-1] != line:
            return
        yield body
