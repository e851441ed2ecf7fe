"""Trail: what each step found, kept where SIGKILL cannot take it, for the next start to compare.

One file per segment and rank, beside the journal.  It is only appended to, a line for each step in one call;
after a commit, a file of some size is begun anew with the steps behind that commit.  A power cut may lose it:
it is never the truth.

A line has the checksum of its JSON (xxh3_64 in 16 hex digits, seeded with `VERSION`), a blank, and the JSON:

    [last complete step, step after which all are whole, [[step, phase, name, epoch, seq, value, count] ...]]

The largest step after which all are whole counts.  The first line that does not fit its checksum, and all
behind it, do not count.  A value is a digest, or the bits of a float64; null where it is on a device, or not
known.

| phase | name | value |
|---|---|---|
| batch | stream | digest of a batch as it was handed out; `epoch` is its pass, `seq` its place in the step |
| pass | stream | none: pass `epoch` of the stream ended, and `step` was the last that drew from the stream |
| copy | phase of a snapshot / part | digest of that part of the state as it was copied |
| others | metric | as the journal has it |
"""

from __future__ import annotations

import errno
import json
import os
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from everstep import hazard
from everstep.contracts.metrics import Block
from everstep.durable import remedy
from everstep.record.journal_format import float_bits, segment_path
from everstep.record.journal_reader import Key, Value
from everstep.untrusted_files import is_count, parse_json, read_regular

VERSION = 6
"""Version of the lines and of the digests in them."""
ENOUGH = 1 << 23
"""Size of the file, in bytes, after which a commit begins it anew."""
LARGEST = 1 << 28
"""Largest size of a file that is read, in bytes."""

_FLOAT, _BITS = struct.Struct("=d"), struct.Struct("=Q")


def trail_path(run_dir: Path, segment: int, rank: int = 0) -> Path:
    return segment_path(run_dir, segment).with_suffix(f".rank-{rank:05d}.trail" if rank else ".trail")


def rank_trails(run_dir: Path, segment: int) -> dict[int, Path]:
    """Return the files of a segment's trails by rank."""
    path = trail_path(run_dir, segment)
    files = path.parent.glob(f"{path.stem}.rank-[0-9][0-9][0-9][0-9][0-9].trail")
    ranks = {int(file.suffixes[0][6:]): file for file in files}
    return {0: path, **ranks} if path.exists() else ranks


def pack_line(body: bytes) -> bytes:
    """Make a line of its JSON."""
    return b"%s %s\n" % (xxhash.xxh3_64_hexdigest(body, VERSION).encode(), body)


class Trail:
    """Writer of one segment's trail, from `step` on; only the training thread calls it.

    If the disk refuses a step's results, the run continues without them; a message says so once.

    Args:
        is_wall: whether a metric depends on the clock, by its name: such values are left out.
        reduced: whether the values of a step are known only when those of all ranks are reduced.

    Attributes:
        compare: takes all that is noted; None: nobody compares it.
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
        self.compare: Callable[[Key, Value | None], None] | None = None
        self._is_wall, self._warn = is_wall, warn
        self._on_host = None if reduced else float
        """Type of the values that a step has on the host."""
        self._names: dict[tuple[str, str], str] = {}
        """(phase, name) -> both as JSON; "" for a metric that depends on the clock."""
        self._absent: defaultdict[str, set[int]] = defaultdict(set)
        """Metric -> the steps at whose end it was not on the host, until it is read."""
        self._records: list[str] = []
        """Records that are not in the file yet."""
        self._descriptor: int | None = None
        """None while the file cannot be made."""
        self._end = 0
        self._last = self._complete_after = step
        """The last step; the one after which all steps are in the file."""
        self._copy = (-1, 0)
        """Step of the newest copy of the state, and the end of the file then."""
        self._has_warned = False
        self._begin(step)

    def note(
        self,
        step: int,
        phase: str,
        name: str,
        value: int | None = 0,
        epoch: int = 0,
        seq: int = 0,
        count: int = 1,
    ) -> None:
        """Note a value, to be written with the step; None: it is not known."""
        names = self._names.get((phase, name))
        if names is None:
            is_left_out = phase == "step" and self._is_wall(name)
            names = self._names[phase, name] = "" if is_left_out else json.dumps([phase, name])[1:-1]
        if names:  # as json.dumps would write it, in half the time: each step comes here
            number = "null" if value is None else value
            self._records.append(f"[{step},{names},{epoch},{seq},{number},{count}]")
            if self.compare is not None:
                self.compare((epoch, step, phase, name, seq), None if value is None else (value, count))

    def step(
        self,
        step: int,
        epoch: int,
        pending: Sequence[tuple[int, str, Any]],
        readings: Mapping[str, tuple[int, float, int]],
    ) -> None:
        """Write what a complete step found; its values are folded as the collector folds them.

        Args:
            pending: values collected and not read yet; the last ones are this step's.
            read: name -> (step, sum, count of values) of metrics that were read in the middle of a step.
        """
        self._last = step
        sums: dict[str, tuple[float, int] | None] = {}
        if readings:  # no call more in each step
            sums |= {name: (total, count) for name, (at, total, count) in readings.items() if at == step}
        first = len(pending)
        while first and pending[first - 1][0] == step:
            first -= 1
        for _, name, value in pending[first:]:
            partial = sums.get(name, (-0.0, 0))  # the sum of -0.0 and a value is that value
            if type(value) is self._on_host and partial is not None:
                sums[name] = (partial[0] + value, partial[1] + 1)
            else:  # a tensor may be on a device: reading its value would make the step wait
                sums[name] = None
        for name, total in sums.items():
            if total is None:
                self._absent[name].add(step)
                self.note(step, "step", name, None, epoch=epoch)
            else:
                bits = _BITS.unpack(_FLOAT.pack(total[0] / total[1]))[0]
                self.note(step, "step", name, bits, epoch=epoch, count=total[1])
        self._write()
        if self._end > LARGEST // 2:  # nothing was saved for very long; a larger file would not be read
            self._begin(step)

    def rows(self, block: Block) -> None:
        """Write rows that were read: those of steps only where the value was not on the host."""
        in_step = block.phase == "step"
        waiting = self._absent.get(block.name, set()) if in_step else set()
        if block.wall or (in_step and not waiting):
            return
        columns = zip(block.steps, float_bits(block.values), block.counts, block.seqs, strict=True)
        for step, value, count, seq in columns:
            if not in_step or step in waiting:  # else it was noted, and compared, at the end of its step
                self.note(step, block.phase, block.name, value, epoch=block.epoch, seq=seq, count=count)
                waiting.discard(step)
        self._write()

    def copied(self, step: int) -> None:
        """Note a copy of the state after `step`; a file that could not be made is tried again."""
        if self._descriptor is None:
            self._begin(self._last)
        if self._copy[0] != step:  # of two copies of a step the first may be saved: the tail follows it
            self._copy = step, self._end

    def committed(self, step: int) -> None:
        """Begin a large file anew, if the newest copy is this commit: a resume needs what follows it."""
        at, end = self._copy
        if at == step and self._descriptor is not None and self._end > ENOUGH:
            try:
                tail = os.pread(self._descriptor, self._end - end, end)
            except OSError as error:
                self._warn_once(error)
            else:
                self._begin(step, tail)

    def close(self) -> None:
        """Let go of the file.  May be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def _begin(self, step: int, tail: bytes = b"") -> None:
        self._end, self._copy, self._complete_after = 0, (-1, 0), max(step, self._complete_after)
        try:
            if self._descriptor is None:
                hazard.reach("trail.create")
                with suppress(FileNotFoundError):  # of a start whose journal was lost; or it is a link
                    self.path.unlink()
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._descriptor = os.open(self.path, flags, 0o666)
            self._append(pack_line(f"[{step},{self._complete_after},[]]".encode()) + tail)
            hazard.reach("trail.truncate")
            os.ftruncate(self._descriptor, self._end)  # behind a whole line: after a kill it is a trail, too
        except OSError as error:
            self._warn_once(error)

    def _write(self) -> None:
        """Append the records; those that the disk refuses are lost."""
        line = pack_line(f"[{self._last},{self._complete_after},[{','.join(self._records)}]]".encode())
        self._records.clear()
        self._append(line)

    def _append(self, lines: bytes) -> None:
        if self._descriptor is not None:
            try:
                hazard.reach("trail.write")
                if os.pwrite(self._descriptor, lines, self._end) == len(lines):
                    self._end += len(lines)
                    return
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                self._warn_once(error)
        self._complete_after = self._last

    def _warn_once(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"{self.path}: {error.strerror}; {remedy(error)}: until it can be written again, the results "
                "of steps do not survive a kill, so a resume cannot compare them"
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


class TrailContent(NamedTuple):
    """Content of a trail: the steps after `full_after` are recorded in full, up to `last`; all marks."""

    full_after: int
    last: int
    marks: list[Mark]


def read_trail(path: Path) -> TrailContent | None:
    """Read a trail; None if it is missing, damaged or of another version."""
    marks, bodies = list[Mark](), list(_bodies(path))
    complete_after = last = 0
    try:
        for body in bodies:
            last, start, records = parse_json(body)
            complete_after = max(complete_after, start)
            marks += map(_mark, records)
    except (TypeError, ValueError):
        return None
    # a forged file may claim more steps than it has lines for
    is_trail = bodies and is_count(last) and is_count(complete_after) and last - complete_after <= len(bodies)
    return TrailContent(complete_after, last, marks) if is_trail else None


def _mark(record: Sequence[Any]) -> Mark:
    mark = Mark(*record)
    value = 0 if mark.value is None else mark.value
    is_value = isinstance(value, int) and 0 <= value < 1 << 64
    numbers = all(map(is_count, (mark.step, mark.epoch, mark.seq, mark.count)))
    if not (numbers and is_value and type(mark.phase) is type(mark.name) is str):
        raise ValueError("it is not a mark")
    return mark


def last_step(path: Path) -> int | None:
    """Read the last complete step from a trail; None if it is none."""
    bodies = list(_bodies(path))
    try:
        last = parse_json(bodies[-1])[0] if bodies else None
    except (LookupError, TypeError, ValueError):
        return None
    return last if is_count(last) else None


def newest_step(run_dir: Path, segment: int) -> int:
    """Read the last complete step of a start from its ranks' trails; 0 without a trail."""
    return max((last_step(path) or 0 for path in rank_trails(run_dir, segment).values()), default=0)


def _bodies(path: Path) -> Iterator[bytes]:
    """Yield the JSON of the lines until the first that is not whole."""
    try:
        lines = read_regular(path, LARGEST).split(b"\n")[:-1]
    except OSError:
        return
    for line in lines:
        body = line[17:]
        if pack_line(body)[:-1] != line:
            return
        yield body
