"""Journal: the append-only truth of a run, one file per segment (a start of the process).

A file is never rewritten, and a new start opens the next number, so nothing is ever appended to a
torn tail.  Rows that a resume or a rollback leaves behind stay in their files: the segments' parents
say which rows are valid (see `everstep.record.journal_reader`).
"""

from __future__ import annotations

import errno
import os
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from everstep import hazard
from everstep.contracts.metrics import Block
from everstep.durable import fsync_folder, no_disk_error, remedy, require_no_link
from everstep.errors import JournalError, UsageError
from everstep.record.journal_format import (
    EVENT,
    METRICS,
    Position,
    joined_blocks,
    pack_block,
    pack_event,
    pack_frame,
    pack_header,
    segment_path,
)
from everstep.record.rundir import certain_id
from everstep.redaction import redacted, without_credentials

PENDING_LIMIT = 64 << 20
"""Bytes that are kept in memory while the disk refuses them."""

_CHUNK = 1 << 20


class Journal:
    """Writer of one segment.  Every method may be called from any thread.  No credential is written.

    While the disk refuses (full, over quota, failing), rows wait in memory and each flush tries again;
    beyond `PENDING_LIMIT` bytes new rows are dropped, and an event "gap" `{"rows", "first_step",
    "last_step"}` says so as soon as an fsync succeeds.  Events are never dropped.  A failed fsync may have
    lost what was written since the last successful one, so that is written again.

    Attributes:
        listeners: called with kind and data of each event but decisions, in the thread that adds it.
    """

    def __init__(self, descriptor: int, path: Path, segment: int, warn: Callable[[str], object]) -> None:
        self.path = path
        self.segment = segment
        self.listeners: list[Callable[[str, dict[str, Any]], None]] = []
        self._fd = descriptor
        self._warn = warn
        self._lock = threading.Lock()  # guards the fields below
        self._syncing = threading.Lock()  # guards the file during an fsync; taken before _lock
        self._open: dict[tuple[int, str, str, bool], list[Block]] = {}  # rows that are not in a frame yet
        self._row_times: dict[tuple[int, str, str, bool], float] = {}  # when the newest of these were added
        self._durable_size = 0  # bytes of the file that are durable
        self._tail = bytearray()  # frames behind these
        self._written_size = 0  # bytes of the tail that are in the file
        self._has_name = False  # whether the file's name is durable
        self._error: OSError | None = None  # the disk's last one; None after an fsync
        self._messages: list[str] = []
        self._gap: dict[str, int] = {}  # data of the next "gap"

    @classmethod
    def open(
        cls,
        run_dir: Path,
        segment: int,
        parent: Position | None,
        facts: dict[str, Any] | None,
        *,
        warn: Callable[[str], object] = warnings.warn,
    ) -> Journal:
        """Create the file of a new segment; its header and "segment" event wait for the first flush.

        Args:
            segment: this start's number, from 1; `RunDir.next_segment()`.
            parent: position of the checkpoint that was resumed from, None for a start from nothing.
            facts: this start's provenance, JSON; None if the segment is not a start and only gets decisions.
            warn: called once when the disk begins to refuse writes, and once when writing works again.
        """
        start = {"run": certain_id(run_dir), "parent": parent, "facts": without_credentials(facts)}
        event = pack_event("segment", start, True, time.time())  # first: facts that are not JSON make no file
        path = segment_path(run_dir, segment)
        with no_disk_error("the journal cannot be created", path):
            require_no_link(path.parent, run_dir)
            hazard.reach("journal.create")
            if os.path.lexists(path):
                raise JournalError(f"{path} exists; open the next segment, RunDir.next_segment()")
            path.parent.mkdir(exist_ok=True)
            descriptor = _create(path)
        journal = cls(descriptor, path, segment, warn)
        journal._tail += pack_header(segment, parent)
        if facts is not None:
            journal._add_event(event)
        return journal

    def append(self, block: Block) -> None:
        """Add rows; they reach the file at the next flush."""
        lengths = [len(column) for column in block[4:]]
        if len(set(lengths)) > 1:
            raise JournalError(f"block {block.name!r} has columns of lengths {lengths}; give equal lengths")
        if block.steps:
            with self._lock:
                self._require_open()
                self._open.setdefault(block[:4], []).append(block)
                self._row_times[block[:4]] = time.time()

    def event(self, kind: str, data: dict[str, Any], wall: bool = False, *, plain: bool = False) -> None:
        """Add an event, for the next flush; if it is `plain`, no text of the user's is in it."""
        content = data if plain else _recordable(data)
        self._add_event(pack_event(kind, content, wall, time.time()))
        for listener in self.listeners:
            listener(kind, content)

    def decide(self, data: dict[str, Any]) -> None:
        """Add an event of kind "decision", which nothing supersedes, and make it durable.

        OSError: it is not.  As the next start may find it, this one must not go on.
        """
        self._add_event(pack_event("decision", _recordable(data), False, time.time()))
        self.sync()

    def flush(self) -> Position:
        """Hand all frames to the operating system, or keep them; return the position behind them."""
        with self._lock:
            self._close_blocks()
            self._write()
            position = Position(self.segment, self._end)
            is_full, gap = self._written_size > PENDING_LIMIT, bool(self._gap)
        self._send_warnings()
        if is_full or gap:  # an fsync bounds the memory that the tail takes
            with suppress(OSError):
                self.fsync_only(position)
        if gap:  # the gap is before the position that a checkpoint takes: a resume from there has to know it
            with self._lock:
                self._write()
                position = Position(self.segment, self._end)
        return position

    def sync(self) -> None:
        """Make everything added so far durable; OSError: some of it is not, and waits for the next flush."""
        self.fsync_only(self.flush())

    @property
    def durable(self) -> int:
        """Number of bytes at the file's beginning that no power cut takes."""
        with self._lock:
            return self._durable_size

    def close(self) -> None:
        """Write all that the disk takes and close the file.  May be called twice; never raises OSError."""
        if self._fd < 0:
            return
        with suppress(OSError):
            self.sync()
        with self._syncing, self._lock:
            descriptor, self._fd = self._fd, -1
            os.close(descriptor)
            if (size := len(self._tail) - self._written_size) or self._gap:
                self._messages.append(
                    f"{self.path}: {size} bytes and {self._gap.get('rows', 0)} dropped rows are lost: they "
                    "could not be written before the run ended"
                )
        self._send_warnings()

    @property
    def _end(self) -> int:
        """Offset after everything added, but for the open blocks."""
        return self._durable_size + len(self._tail)

    def _require_open(self) -> None:
        if self._fd < 0:
            raise UsageError(f"{self.path} is closed; call it before Journal.close()")

    def _add_event(self, event: bytes) -> None:
        with self._lock:
            self._require_open()
            self._close_blocks()  # an event follows the rows that came before
            self._tail += pack_frame(EVENT, self._end, event)

    def _close_blocks(self) -> None:
        """Pack the rows of each metric as a single block: each boundary may have read a few of them."""
        while self._open:
            key = next(iter(self._open))
            block, time_of_newest = joined_blocks(self._open.pop(key)), self._row_times.pop(key)
            if self._error is not None and len(self._tail) > PENDING_LIMIT:
                first, last = min(block.steps), max(block.steps)
                self._gap = {
                    "rows": self._gap.get("rows", 0) + len(block.steps),
                    "first_step": min(self._gap.get("first_step", first), first),
                    "last_step": max(self._gap.get("last_step", last), last),
                }
            else:
                self._tail += pack_frame(METRICS, self._end, pack_block(block, time_of_newest))

    def _write(self) -> None:
        try:
            while self._written_size < len(self._tail):
                hazard.reach("journal.write")
                chunk = self._tail[self._written_size : self._written_size + _CHUNK]
                # a nearly full disk takes a part, without an error
                self._written_size += os.pwrite(self._fd, chunk, self._durable_size + self._written_size)
        except OSError as error:
            self._note_disk_error(error)

    def _note_disk_error(self, error: OSError) -> None:
        if self._error is None:
            self._messages.append(
                f"{self.path}: {error.strerror}: the journal cannot be written; training continues, and rows "
                f"wait in memory, up to {PENDING_LIMIT >> 20} MiB, until the journal can be written again "
                f"({remedy(error)})"
            )
        self._error = error

    def fsync_only(self, position: Position) -> None:
        """Make everything up to `position` durable without flushing later frames.

        OSError: it is not durable (a commit that needs it must fail).
        """
        with self._syncing:
            with self._lock:
                self._require_open()
                self._require_place()
                size = self._written_size
                if self._durable_size + size < position.offset:
                    code = errno.ENOSPC if self._error is None else self._error.errno or errno.ENOSPC
                    message = f"the journal waits to be written ({os.strerror(code)})"
                    raise OSError(code, message, str(self.path))
                if self._has_name and self._durable_size >= position.offset:
                    return
            try:  # outside _lock, so that the training thread can add frames meanwhile
                hazard.reach("journal.fsync")
                os.fsync(self._fd)
                if not self._has_name:  # a power cut may take a new file's name although its bytes stay
                    fsync_folder(self.path.parent, "journal")
                    fsync_folder(self.path.parent.parent, "journal")
            except OSError as error:
                with self._lock:
                    self._written_size = 0  # a failed fsync does not say what the disk has
                    self._note_disk_error(error)
                self._send_warnings()
                raise
            # `size` was taken before the fsync: what was written since is not known to be durable.
            with self._lock:
                self._has_name = True
                del self._tail[:size]
                self._durable_size += size
                self._written_size -= size
                if self._error is not None and self._written_size == len(self._tail):
                    self._note_recovery()
            self._send_warnings()

    def _require_place(self) -> None:
        """Write the file again where its name was taken away: without one it ends with this process.

        OSError: something else has the name.
        """
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._fd), os.lstat(self.path)):
                return
        require_no_link(self.path.parent, self.path.parent.parent)
        self.path.parent.mkdir(exist_ok=True)
        nameless, self._fd = self._fd, _create(self.path)
        self._tail[:0] = os.pread(nameless, self._durable_size, 0)
        os.close(nameless)
        self._durable_size, self._written_size, self._has_name = 0, 0, False
        self._write()
        self._messages.append(f"{self.path} was removed or moved; it is written again, and nothing is lost")

    def _note_recovery(self) -> None:
        """Take note that nothing waits in memory any more, and declare what was dropped."""
        self._error = None
        self._messages.append(
            f"{self.path}: the journal can be written again; the rows that waited are written"
        )
        if self._gap:
            self._tail += pack_frame(EVENT, self._end, pack_event("gap", self._gap, True, time.time()))
            self._gap = {}

    def _send_warnings(self) -> None:
        """Pass the messages on while no lock is held: `warn` may use this journal, and may raise."""
        while self._messages:
            self._warn(self._messages.pop(0))


def _create(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


class NoJournal(Journal):
    """Journal of a rank that records nothing: the writer does."""

    def __init__(self, segment: int) -> None:
        self.segment = segment
        self.listeners = []

    def flush(self) -> Position:
        return Position(self.segment, 0)

    def _nothing(self, *args: Any, **options: Any) -> None:
        pass

    append = event = decide = sync = fsync_only = close = _nothing


def _recordable(data: dict[str, Any]) -> dict[str, Any]:
    """Take credentials out of an event's data; a reason, which people read, loses the user's patterns too."""
    return {
        name: redacted(value) if name == "reason" else without_credentials(value)
        for name, value in data.items()
    }
