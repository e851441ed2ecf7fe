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
from everstep.record.journal_format import HEADER_SIZE, VERSION, Frame, Hole, Position
from everstep.untrusted_files import open_regular, require_no_hole

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
            return _in_name(data["facts"].get("resumed_from"))
        if self.kind == "checkpoint":
            return _in_name(data["name"])
        if self.kind == "times":
            return (data.get("steps") or [0])[-1], data.get("epoch", 0)
        if self.kind in ("progress", "interrupted", "ended", "closed"):
            return data.get("step", 0), data.get("epoch", 0)
        return 0, 0


def _in_name(checkpoint: object) -> tuple[int, int]:
    match = _CHECKPOINT.fullmatch(checkpoint) if isinstance(checkpoint, str) else None
    return (int(match[2]), int(match[1] or 0)) if match else (0, 0)


def step_of(checkpoint: object) -> int:
    """Return the step in a checkpoint's name; 0 for what is not a checkpoint's name."""
    return _in_name(checkpoint)[0]


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


@dataclass
class Segment:
    """Content of one file of a journal, which the start `number`, from 1, has written.

    Attributes:
        end: the offset after the last whole frame; 0 if there is none.
        size: the bytes of the file up to the end of that frame; later bytes are torn, or being written.
        started: False if a kill came before the start was written, or the file has only a person's decision.
        parent: the position that the segment continues from; None if it started from nothing.
        events, blocks: in the order of writing.
        problems, torn: descriptions of damaged places; of a torn end, as a kill leaves it.
    """

    number: int
    path: Path
    end: int = 0
    size: int = 0
    started: bool = False
    parent: Position | None = None
    events: list[Event] = field(default_factory=list)
    blocks: list[StoredBlock] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    torn: str = ""


def segment_path(run_dir: Path, segment: int) -> Path:
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
    """
    is_continued, start = start > HEADER_SIZE, max(start, HEADER_SIZE)
    with open_regular(path) as file:
        require_no_hole(file)
        head = file.read(HEADER_SIZE)
        file.seek(start)
        data = file.read()
    header = journal_format.unpack_header(head)
    if header is not None and header.version != VERSION:
        other = f"{path} has journal format {header.version}, this everstep reads only {VERSION}"
        raise JournalError(f"{other}; use the everstep that wrote it")
    number = segment_number(path) or (header.segment if header else 0)
    if header is not None and header.segment != number:
        # perhaps of another run: none of its rows may count as this start's
        return _refused(number, path, f"its header says segment {header.segment}; was it renamed?")
    segment = Segment(number, path, size=start if len(head) == HEADER_SIZE else len(head))
    if header is None and head:
        segment.problems.append(f"{path.name}: the header ({HEADER_SIZE} bytes at 0) is torn or damaged")
    _add_frames(segment, data, start, moved=None if is_continued else 0)
    begun = [event.data for event in segment.events if event.kind == "segment"]
    writer = next((each["run"] for each in begun if each.get("run") is not None), run)
    if run is not None and writer != run:
        return _refused(number, path, f"the run {writer} has written it, and this is {run};")
    if header is not None:
        segment.parent = header.parent
    elif begun and begun[0].get("parent"):
        segment.parent = Position(*begun[0]["parent"])
    only_decided = bool(segment.events) and all(event.kind == "decision" for event in segment.events)
    is_start = header is not None and (not only_decided or is_continued or bool(segment.blocks))
    segment.started = is_start or bool(begun)
    return segment


def _add_frames(segment: Segment, data: bytes, start: int, moved: int | None) -> None:
    """Add the frames of bytes from `start` on, which were written `moved` bytes further on; None: unknown."""
    last, problems = -1, list[str]()
    for each in journal_format.scan(data, 0):
        at, length = start + each.start, each.end - each.start
        if isinstance(each, Hole):
            if each.end == len(data):
                segment.torn = (
                    f"{segment.path.name}: the last {length} bytes, from {at} on, are torn; they are dropped"
                )
            else:
                problems.append(f"{length} bytes at {at} are damaged; they are skipped")
            continue
        segment.size = start + each.end
        if each.offset <= last:  # offsets only grow, so a file that was copied together counts no row twice
            problems.append(f"the frame at {at} is repeated or out of order; it is skipped")
            continue
        if moved not in (None, each.offset - at):
            problems.append(f"the frame at {at} was written at {each.offset}; what is before it was changed")
        moved, last, segment.end = each.offset - at, each.offset, each.offset + length
        try:
            _add_frame(segment, each)
        except ValueError as wrong:
            problems.append(f"the frame at {at} {wrong}; it is skipped")
    segment.problems += [f"{segment.path.name}: {problem}" for problem in problems]


def _add_frame(segment: Segment, frame: Frame) -> None:
    """Unpack a frame; a ValueError says why it holds nothing."""
    if frame.kind == journal_format.METRICS:
        if not journal_format.is_block(frame.payload):
            raise ValueError(f"claims rows that its {len(frame.payload)} bytes do not hold")
        segment.blocks.append(StoredBlock(frame.offset, frame.payload))
    elif frame.kind == journal_format.EVENT:
        event = journal_format.unpack_event(frame.payload)
        if wrong := misfit(event["kind"], event["data"]):
            raise ValueError(f"is not an event of kind {event['kind'][:40]!r} ({wrong})")
        segment.events.append(Event(segment.number, frame.offset, **event))
    else:
        raise ValueError(f"is of unknown kind {frame.kind}")


def _refused(number: int, path: Path, why: str) -> Segment:
    return Segment(number, path, problems=[f"{path.name}: {why} no row of it is read"])


def in_order(segment: Segment) -> list[Item]:
    """List the events and blocks of a segment as they were written."""
    items: list[Item] = [*segment.events, *segment.blocks]
    return sorted(items, key=lambda item: item.offset)


def read_or_miss(number: int, path: Path, run: str | None = None) -> Segment:
    """Read a file of a journal; a file that cannot be read counts as damaged from end to end."""
    try:
        return read_segment(path, run=run)
    except OSError as error:
        return _refused(number, path, f"it cannot be read ({error.strerror});")
