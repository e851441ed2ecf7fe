"""Journal: the append-only truth of a run, one file per segment (a start of the process).

A file is never rewritten, and a new start opens the next number, so nothing is ever appended to a
torn tail.  Rows that a resume or a rollback leaves behind stay in their files: the segments' parents
say which rows are valid (see `everstep.record.journal_reader`).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from everstep import hazard
from everstep.contracts.metrics import Block
from everstep.durable import fsync_folder, remedy, require_no_link
from everstep.errors import JournalError, RunDirError, UsageError
from everstep.record.journal_format import (
    EVENT,
    FRAME_SIZE,
    METRICS,
    Position,
    joined_blocks,
    link,
    linked_event,
    linked_gap,
    pack_block,
    pack_event,
    pack_frame,
    pack_header,
    require_equal_columns,
)
from everstep.record.lock import is_watched
from everstep.record.rundir import certain_id
from everstep.record.segment_file import segment_path
from everstep.redaction import redacted, without_credentials

PENDING_LIMIT = 64 << 20
"""Bytes of rows kept in memory while the disk refuses them."""

_CHUNK = 1 << 20


class _Frame(NamedTuple):
    """Packed frame, its offset, and the link before it.

    `rows` is 0 for an event, which is never dropped; a `gap` stands in the place of others, in no link.
    """

    data: bytes
    offset: int
    rows: int = 0
    first: int = 0
    last: int = 0
    before: int = 0
    gap: bool = False


class _Lost(NamedTuple):
    rows: int
    first: int
    last: int


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


class Journal:
    """Writer of one segment.  Every method may be called from any thread.  No credential is written.

    While the disk refuses (full, over quota, failing), rows wait in memory and each flush tries
    again; beyond `limit` bytes the oldest rows are dropped, and a "gap" event
    `{"rows", "first_step", "last_step"}` says so in their place.  Events are never dropped.
    A failed fsync may have lost the frames since the last successful fsync, so they are written again.

    Attributes:
        listeners: called with kind and data of each event but decisions, in the thread that adds it.
    """

    def __init__(self, descriptor: int, path: Path, segment: int, warn: Callable[[str], None], limit: int):
        self.path = path
        self.segment = segment
        self.listeners: list[Callable[[str, dict[str, Any]], None]] = []
        self._fd = descriptor
        self._warn = warn
        self._limit = limit
        self._lock = threading.Lock()  # guards the fields below
        self._syncing = threading.Lock()  # guards the file during an fsync; taken before _lock
        self._end = 0  # the offset after everything added, but for the open blocks
        self._link = 0  # of everything added, for the next event
        self._open: dict[tuple[int, str, str, bool], list[Block]] = {}  # rows that are not in a frame yet
        self._added: dict[tuple[int, str, str, bool], float] = {}  # when the newest of these were added
        self._queue: deque[_Frame] = deque()  # frames that are not in the file
        self._queued = 0  # bytes in _queue
        self._unsynced: deque[_Frame] = deque()  # frames in the file that are not known to be durable
        self._size = 0  # bytes in the file
        self._durable = 0  # bytes in the file that are durable
        self._named = False  # whether the file's name is durable
        self._down = ""  # the call that the disk refuses, "write" or "fsync", until this call succeeds again
        self._why: OSError | None = None  # the last refusal
        self._messages: deque[str] = deque()
        self._lost: _Lost | None = None
        self._gap: _Frame | None = None  # the event for _lost, in _queue

    @classmethod
    def open(
        cls,
        run_dir: Path,
        segment: int,
        parent: Position | None,
        facts: dict[str, Any] | None,
        *,
        warn: Callable[[str], None] = _warn,
        limit: int = PENDING_LIMIT,
    ) -> Journal:
        """Create the file of a new segment; its header and "segment" event wait for the first flush.

        Args:
            run_dir: the run directory.
            segment: this start's number, from 1; `RunDir.next_segment()`.
            parent: position of the checkpoint that was resumed from, None for a start from nothing.
            facts: this start's provenance, JSON; None if the segment is not a start and only gets decisions.
            warn: called once when the disk begins to refuse writes, and once when writing works again.
            limit: bytes kept in memory while the disk refuses.

        Raises:
            JournalError: the segment exists; `facts` are not JSON.
            RunDirError: the file cannot be created.
        """
        told = {"run": certain_id(run_dir), "parent": parent, "facts": without_credentials(facts)}
        event = pack_event("segment", told, True, time.time())  # first: facts that are not JSON make no file
        path = segment_path(run_dir, segment)
        try:
            require_no_link(path.parent, run_dir)
            hazard.reach("journal.create")
            path.parent.mkdir(exist_ok=True)
            descriptor = _create(path)
        except FileExistsError as error:
            raise JournalError(f"{path} exists; open the next segment, RunDir.next_segment()") from error
        except RunDirError:
            raise
        except OSError as error:
            raise RunDirError(
                error.errno, f"the journal cannot be created: {error.strerror}; {remedy(error)}", str(path)
            ) from error
        journal = cls(descriptor, path, segment, warn, limit)
        journal._push(_Frame(pack_header(segment, parent), 0))
        if facts is not None:
            journal._add(EVENT, event)
        return journal

    def append(self, block: Block) -> None:
        """Add rows; they reach the file at the next flush.

        Raises:
            JournalError: the block's columns differ in length.
        """
        require_equal_columns(block)
        if block.steps:
            with self._lock:
                self._require_open()
                self._open.setdefault(block[:4], []).append(block)
                self._added[block[:4]] = time.time()

    def event(self, kind: str, data: dict[str, Any], wall: bool = False, *, plain: bool = False) -> None:
        """Add an event; it reaches the file at the next flush.

        Args:
            plain: whether `data` has no text of the user's, so that no credential is looked for.

        Raises:
            JournalError: `data` is not JSON.
        """
        told = data if plain else _recordable(data)
        self._add(EVENT, pack_event(kind, told, wall, time.time()))
        for heard in self.listeners:
            heard(kind, told)

    def decide(self, data: dict[str, Any]) -> None:
        """Add an event of kind "decision", which nothing supersedes, and make it durable.

        Raises:
            OSError: the decision could not be made durable, so it must not be applied; it is withdrawn.
        """
        frame = self._add(EVENT, pack_event("decision", _recordable(data), False, time.time()))
        try:
            self.sync()
        except OSError:
            with self._lock:
                if frame in self._queue:
                    self._withdraw(frame)
            raise

    def _withdraw(self, frame: _Frame) -> None:
        """Take a frame out of the queue as if it had never been added: an audit finds no hole there."""
        queue = list(self._queue)
        at = queue.index(frame)
        if at == len(queue) - 1:
            queue, self._end, self._link = queue[:at], frame.offset, frame.before
        else:
            queue[at] = self._gap_at(frame, _Lost(0, 0, 0), queue[at + 1 :])
        self._queue, self._queued = deque(queue), sum(len(each.data) for each in queue)

    def flush(self) -> Position:
        """Hand all frames to the operating system; frames that the disk refuses wait in memory.

        Returns:
            The position after everything added so far, written or not: `fsync_only` raises if it is not.
        """
        with self._lock:
            self._close_blocks()
            self._write()
            position = Position(self.segment, self._end)
            crowded = self._size - self._durable > self._limit
        self._tell()
        if crowded:  # an fsync bounds the memory that _unsynced takes
            with contextlib.suppress(OSError):
                self._fsync(position.offset)
        return position

    def sync(self) -> None:
        """Make everything added so far durable.

        Raises:
            OSError: some frames are not durable; they stay in memory for the next flush.
        """
        self._fsync(self.flush().offset)

    def fsync_only(self, position: Position) -> None:
        """Make everything up to `position` durable without flushing later frames.

        Raises:
            OSError: the frames are not durable (a commit that needs them must fail).
        """
        self._fsync(position.offset)

    @property
    def durable(self) -> int:
        """Number of bytes at the file's beginning that no power cut takes, whole frames."""
        with self._lock:
            return self._durable

    def is_watched(self) -> bool:
        """Whether somebody looks at the run: `everstep.record.lock.Watch` holds a lock on the file."""
        return is_watched(self._fd)

    def close(self) -> None:
        """Write all that the disk takes and close the file.  May be called twice; never raises OSError."""
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            self.sync()
        with self._syncing, self._lock:
            descriptor, self._fd = self._fd, -1
            os.close(descriptor)
            rows = sum(frame.rows for frame in self._queue) + (self._lost.rows if self._lost else 0)
            if rows:
                self._messages.append(
                    f"{self.path}: {rows} rows are lost: they could not be written before the run ended"
                )
        self._tell()

    def _add(self, kind: int, payload: bytes, rows: int = 0, first: int = 0, last: int = 0) -> _Frame:
        with self._lock:
            self._require_open()
            self._close_blocks()  # an event follows the rows that came before
            return self._frame(kind, payload, rows, first, last)

    def _frame(self, kind: int, payload: bytes, rows: int = 0, first: int = 0, last: int = 0) -> _Frame:
        if kind == EVENT:
            payload = linked_event(payload, self._link)
        packed = pack_frame(kind, self._end, payload)
        frame = _Frame(packed, self._end, rows, first, last, self._link)
        self._push(frame)
        return frame

    def _close_blocks(self) -> None:
        """Pack the rows of each metric as a single block: each boundary may have read a few of them."""
        while self._open:
            key = next(iter(self._open))
            block = joined_blocks(self._open.pop(key))
            payload = pack_block(block, self._added.pop(key))
            self._frame(METRICS, payload, len(block.steps), min(block.steps), max(block.steps))

    def _require_open(self) -> None:
        if self._fd < 0:
            raise UsageError(f"{self.path} is closed; call it before Journal.close()")

    def _push(self, frame: _Frame) -> None:
        self._queue.append(frame)
        self._queued += len(frame.data)
        self._end += len(frame.data)
        # the head has the checksum of the rest
        self._link = link(frame.data[:FRAME_SIZE], self._link)

    def _write(self) -> None:
        try:
            while self._queue:
                self._write_chunk()
        except OSError as error:
            # A part of a frame may be in the file: cut it off, so that the file ends with a whole frame.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            self._refused("write", error)
        else:
            self._accepted("write")

    def _write_chunk(self) -> None:
        """Write whole frames, about a chunk at once: a failure loses little, and written frames stay."""
        frames = size = 0
        for frame in self._queue:
            frames, size = frames + 1, size + len(frame.data)
            if size >= _CHUNK:
                break
        data = memoryview(b"".join(frame.data for frame in itertools.islice(self._queue, frames)))
        hazard.reach("journal.write")
        done = 0
        while done < size:  # a nearly full disk takes a part, without an error
            done += os.pwrite(self._fd, data[done:], self._size + done)
        for _ in range(frames):
            frame = self._queue.popleft()
            self._unsynced.append(frame)
            if frame is self._gap:
                self._lost = self._gap = None
        self._size += size
        self._queued -= size

    def _refused(self, what: str, error: OSError) -> None:
        if not self._down:
            self._messages.append(
                f"{self.path}: {error.strerror}: the journal cannot be written; training continues, and "
                f"rows wait in memory, up to {self._limit >> 20} MiB, until the journal can be written again "
                f"({remedy(error)})"
            )
        self._why = error
        if self._down != "fsync":  # after a failed fsync a write that succeeds proves nothing
            self._down = what
        if self._queued > self._limit:
            self._shed()

    def _accepted(self, what: str) -> None:
        if self._down == what:
            self._down = ""
            self._messages.append(
                f"{self.path}: the journal can be written again; the rows that waited are written"
            )

    def _shed(self) -> None:
        """Drop the oldest rows down to 7/8 of the limit, with a single gap event in their place."""
        target = self._limit - self._limit // 8
        kept: list[_Frame] = []
        place: tuple[int, _Frame] | None = None  # index in kept, and the first frame that goes
        lost = self._lost
        for frame in self._queue:
            if frame is not self._gap and not (frame.rows and self._queued > target):
                kept.append(frame)
                continue
            place = place or (len(kept), frame)
            self._queued -= len(frame.data)
            if frame is not self._gap:
                lost = _joined(lost, frame)
        if place is not None and lost is not None:
            index, first = place
            self._lost, self._gap = lost, self._gap_at(first, lost, kept[index:])
            kept.insert(index, self._gap)
            self._queued += len(self._gap.data)
        self._queue = deque(kept)

    def _gap_at(self, first: _Frame, lost: _Lost, kept: list[_Frame]) -> _Frame:
        """Make the event that stands in the place of lost frames.

        Args:
            first: the first of them.
            kept: the frames behind it that are not lost.
        """
        data = {"rows": lost.rows, "first_step": lost.first, "last_step": lost.last}
        event = linked_gap(pack_event("gap", data, True, time.time()), first.before, self._behind_lost(kept))
        return _Frame(pack_frame(EVENT, first.offset, event), first.offset, before=first.before, gap=True)

    def _behind_lost(self, kept: list[_Frame]) -> list[tuple[int, int]]:
        """Return the offset of each frame that follows lost ones, and the link before it."""
        found: list[tuple[int, int]] = []
        expected: int | None = None
        for frame in kept:
            if not frame.gap:
                found += [(frame.offset, frame.before)] if frame.before != expected else []
                expected = link(frame.data[:FRAME_SIZE], frame.before)
        return found if expected == self._link else [*found, (self._end, self._link)]

    def _fsync(self, needed: int) -> None:
        with self._syncing:
            with self._lock:
                self._require_open()
                self._stay()
                if self._queue and self._queue[0].offset < needed:
                    code = errno.ENOSPC if self._why is None else self._why.errno or errno.ENOSPC
                    raise OSError(
                        code, f"the journal waits to be written ({os.strerror(code)})", str(self.path)
                    )
                if self._named and not (self._unsynced and self._unsynced[0].offset < needed):
                    return
                size = self._size
            try:  # outside _lock, so that the training thread can add frames meanwhile
                hazard.reach("journal.fsync")
                os.fsync(self._fd)
                if not self._named:  # a power cut may take a new file's name although its bytes are durable
                    fsync_folder(self.path.parent, "journal")
                    fsync_folder(self.path.parent.parent, "journal")
            except OSError as error:
                with self._lock:
                    self._rewind(error)
                self._tell()
                raise
            # `size` was taken before the fsync: frames written since are not known to be durable.
            with self._lock:
                self._named = True
                while self._durable < size:
                    self._durable += len(self._unsynced.popleft().data)
                self._accepted("fsync")
            self._tell()

    def _stay(self) -> None:
        """Write the file again where its name was taken away: a file without a name dies with this process.

        Raises:
            OSError: another file has the name, or the disk refuses.
        """
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._fd), os.lstat(self.path)):
                return
        require_no_link(self.path.parent, self.path.parent.parent)
        self.path.parent.mkdir(exist_ok=True)
        made = _create(self.path)
        try:
            for at in range(0, self._size, _CHUNK):
                os.pwrite(made, os.pread(self._fd, min(_CHUNK, self._size - at), at), at)
            os.fsync(made)
            # dup2 keeps the descriptor's number, so no other thread ever sees a closed file.
            os.dup2(made, self._fd, inheritable=False)
        except BaseException:
            self.path.unlink()
            raise
        finally:
            os.close(made)
        self._named = False
        self._messages.append(f"{self.path} was removed or moved; it is written again, and nothing is lost")

    def _rewind(self, error: OSError) -> None:
        """Queue all frames again that were not durable: a failed fsync does not say which the disk has."""
        self._queue.extendleft(reversed(self._unsynced))
        self._queued += self._size - self._durable
        self._unsynced.clear()
        self._size = self._durable
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self._size)
        self._refused("fsync", error)

    def _tell(self) -> None:
        """Pass the messages on while no lock is held: `warn` may use this journal, and may raise."""
        while self._messages:
            self._warn(self._messages.popleft())


class NoJournal(Journal):
    """Journal of a rank that records nothing: the writer does.

    Args:
        segment: this start's number, from 1.
    """

    def __init__(self, segment: int) -> None:
        self.segment = segment
        self.listeners = []

    def append(self, block: Block) -> None:
        pass

    def event(self, kind: str, data: dict[str, Any], wall: bool = False, *, plain: bool = False) -> None:
        pass

    def decide(self, data: dict[str, Any]) -> None:
        pass

    def flush(self) -> Position:
        return Position(self.segment, 0)

    def sync(self) -> None:
        pass

    def fsync_only(self, position: Position) -> None:
        pass

    def is_watched(self) -> bool:
        return False

    def close(self) -> None:
        pass


def _create(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def _recordable(data: dict[str, Any]) -> dict[str, Any]:
    """Take credentials out of an event's data; a reason, which people read, loses the user's patterns too."""
    return {
        name: redacted(value) if name == "reason" else without_credentials(value)
        for name, value in data.items()
    }


def _joined(lost: _Lost | None, frame: _Frame) -> _Lost:
    if lost is None:
        return _Lost(frame.rows, frame.first, frame.last)
    return _Lost(lost.rows + frame.rows, min(lost.first, frame.first), max(lost.last, frame.last))
