"""One file of a journal: its events and blocks, read despite any damage in the file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from everstep.contracts.metrics import Block
from everstep.errors import JournalError
from everstep.record import journal_format
from everstep.record.event_fields import misfit
from everstep.record.journal_format import Frame, Hole, Position
from everstep.untrusted_files import is_count, open_regular, require_no_hole

_FILE_NAME = re.compile(r"segment-([0-9]{4,9})\.evj")
_CHECKPOINT = re.compile(r"(?:epoch-([0-9]{4,18})-)?step-([0-9]{8,18})")


class Event(NamedTuple):
    """Something that happened; `time` in seconds since 1970, `offset` its place in its segment."""

    segment: int
    offset: int
    kind: str
    data: dict[str, Any]
    wall: bool
    time: float

    @property
    def completed(self) -> tuple[int, int]:
        """(step, epoch) that the event says are complete, or begun; 0 where it says nothing."""
        data = self.data
        if self.kind == "segment":
            return _in_name(data.get("facts", {}).get("resumed_from"))
        if self.kind == "checkpoint":
            return _in_name(data.get("name"))
        if self.kind == "times":
            steps = data.get("steps")
            return _count(steps[-1] if isinstance(steps, list) and steps else 0), _count(data.get("epoch"))
        if self.kind in ("progress", "interrupted", "ended", "closed"):
            return _count(data.get("step")), _count(data.get("epoch"))
        return 0, 0


def _in_name(checkpoint: object) -> tuple[int, int]:
    """Parse the (step, epoch) in a checkpoint's name; (0, 0) if it is not a checkpoint's name."""
    match = _CHECKPOINT.fullmatch(checkpoint) if isinstance(checkpoint, str) else None
    return (_count(int(match[2])), _count(int(match[1] or 0))) if match else (0, 0)


def step_of(checkpoint: object) -> int:
    """Return the step in a checkpoint's name; 0 for what is not a checkpoint's name."""
    return _in_name(checkpoint)[0]


def _count(value: object) -> int:
    return value if is_count(value) else 0


class StoredBlock(NamedTuple):
    """Block as it lies in the file, unpacked on request, so that a long run fits in memory."""

    offset: int
    payload: memoryview

    @property
    def block(self) -> Block:
        return journal_format.unpack_block(self.payload)

    @property
    def time(self) -> float:
        """Time when the newest row of the block was added, in seconds since 1970."""
        return journal_format.block_time(self.payload)


Item: TypeAlias = Event | StoredBlock
"""Entry of a journal."""


@dataclass(frozen=True)
class Segment:
    """Content of one file of a journal.

    Attributes:
        number: number of the start of the process that wrote the file, from 1.
        path: the file.
        end: the offset after the last whole frame; 0 if there is none.
        size: the bytes of the file up to the end of that frame; later bytes are torn, or being written.
        started: False if a kill came before the start was written, or if the file has a person's decision
            alone.
        parent: the position that the segment continues from; None if it started from nothing.
        events: in the order of writing.
        blocks: in the order of writing.
        problems: descriptions of damaged places, with offsets.
        torn: description of what follows the last whole frame, as a kill leaves it; "" if nothing does.
    """

    number: int
    path: Path
    end: int
    size: int = 0
    started: bool = False
    parent: Position | None = None
    events: list[Event] = field(default_factory=list)
    blocks: list[StoredBlock] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    torn: str = ""


def segment_path(run_dir: Path, segment: int) -> Path:
    """Path of the file of a segment of the run in `run_dir`."""
    return run_dir / "journal" / f"segment-{segment:04d}.evj"


def segment_number(path: Path) -> int | None:
    """Parse the number in a journal file's name; None for any other file."""
    match = _FILE_NAME.fullmatch(path.name)
    number = int(match[1]) if match else 0
    return number if number and segment_path(Path(), number).name == path.name else None


def read_segment(path: Path, start: int = 0, run: str | None = None) -> Segment:
    """Read one file of a journal, despite any damage in the file.

    Args:
        start: the `size` that an earlier reading returned: only later frames are returned.
        run: the id of the run; a file that another run's start has written has no row.  None: not asked.

    Raises:
        JournalError: a newer format version wrote it.
        OSError: the file cannot be read.
    """
    is_continued, start = start > journal_format.HEADER_SIZE, max(start, journal_format.HEADER_SIZE)
    with open_regular(path) as file:
        require_no_hole(file)
        head = file.read(journal_format.HEADER_SIZE)
        file.seek(start)
        data = file.read()
    header = journal_format.unpack_header(head)
    if header is not None and header.version > journal_format.VERSION:
        raise JournalError(
            f"{path} has journal format {header.version}, this everstep reads up to "
            f"{journal_format.VERSION}; upgrade everstep"
        )
    number = segment_number(path) or (header.segment if header else 0)
    if header is not None and header.segment != number:
        # perhaps of another run: none of its rows may count as this start's
        return _refused(number, path, f"its header says segment {header.segment}; was it renamed?")
    events: list[Event] = []
    blocks: list[StoredBlock] = []
    problems: list[str] = []
    if header is None and head:
        problems.append(f"the header ({journal_format.HEADER_SIZE} bytes at 0) is torn or damaged")
    torn, last, end, size = "", -1, 0, start if len(head) == journal_format.HEADER_SIZE else len(head)
    moved = None if is_continued else 0
    for found in journal_format.scan(data, 0):
        at, length = start + found.start, found.end - found.start
        if isinstance(found, Hole):
            if found.end == len(data):
                torn = f"{path.name}: the last {length} bytes, from {at} on, are torn; they are dropped"
            else:
                problems.append(f"{length} bytes at {at} are damaged; they are skipped")
            continue
        size = start + found.end
        if found.offset <= last:  # offsets only grow, so a file that was copied together counts no row twice
            problems.append(f"the frame at {at} is repeated or out of order; it is skipped")
            continue
        if moved not in (None, found.offset - at):
            problems.append(
                f"the frame at {at} was written at {found.offset}; something before it was changed"
            )
        moved = found.offset - at
        last, end = found.offset, found.offset + length
        item = _unpack(number, found)
        if isinstance(item, Event):
            events.append(item)
        elif isinstance(item, StoredBlock):
            blocks.append(item)
        else:
            problems.append(f"the frame at {at} {item}; it is skipped")
    begun = [event.data for event in events if event.kind == "segment"]
    writer = next((data["run"] for data in begun if data.get("run") is not None), run)
    if run is not None and writer != run:
        return _refused(number, path, f"the run {writer} has written it, and this is {run};")
    starts = [data.get("parent") for data in begun]
    parent = header.parent if header else Position(*starts[0]) if starts and starts[0] else None
    alone = bool(events) and all(event.kind == "decision" for event in events)
    is_start = header is not None and (not alone or is_continued or bool(blocks))
    problems = [f"{path.name}: {problem}" for problem in problems]
    return Segment(number, path, end, size, is_start or bool(starts), parent, events, blocks, problems, torn)


def _refused(number: int, path: Path, why: str) -> Segment:
    return Segment(number, path, 0, problems=[f"{path.name}: {why} no row of it is read"])


def in_order(segment: Segment) -> list[Item]:
    """List the events and blocks of a segment as they were written."""
    items: list[Item] = [*segment.events, *segment.blocks]
    return sorted(items, key=lambda item: item.offset)


def _unpack(segment: int, frame: Frame) -> Item | str:
    """Unpack a frame; or say why the frame holds nothing."""
    if frame.kind == journal_format.METRICS:
        if journal_format.is_block(frame.payload):
            return StoredBlock(frame.offset, frame.payload)
        return f"claims rows that its {len(frame.payload)} bytes do not hold"
    if frame.kind != journal_format.EVENT:
        return f"is of unknown kind {frame.kind}"
    try:
        record = journal_format.unpack_event(frame.payload)
    except ValueError:
        return "is not an event"
    if wrong := misfit(record["kind"], record["data"]):
        return f"is not an event of kind {record['kind'][:40]!r} ({wrong})"
    return Event(segment, frame.offset, record["kind"], record["data"], record["wall"], record["time"])


def read_or_miss(number: int, path: Path, run: str | None = None) -> Segment:
    """Read a file of a journal; a file that cannot be read counts as damaged from end to end."""
    try:
        return read_segment(path, run=run)
    except OSError as error:
        return _refused(number, path, f"it cannot be read ({error.strerror});")
