"""Check of a journal file against the links that its events hold: is it what was written?

The links have no key: they show damage and careless edits, not a forger who computes all later links anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from everstep.record import journal_format
from everstep.record.journal_format import EVENT, FRAME_SIZE, Frame, Hole, link
from everstep.untrusted_files import open_regular, require_no_hole


class Links(NamedTuple):
    """What the links of a journal file say.

    Attributes:
        problems: where the file is not what was written.
        notes: what is missing without a fault: a torn end, rows that a full disk has cost.
    """

    problems: list[str]
    notes: list[str]


def check_links(path: Path) -> Links:
    """Check a journal file.

    Raises:
        OSError: the file cannot be read.
    """
    with open_regular(path) as file:
        require_no_hole(file)
        data = file.read()
    checked = _Checked(path.name, link(data[:FRAME_SIZE], 0))
    for found in journal_format.scan(data, journal_format.HEADER_SIZE):
        if isinstance(found, Frame):
            checked.frame(found, data[found.start : found.end])
        else:
            checked.hole(found, is_last=found.end == len(data))
    return Links(checked.problems, checked.notes)


class _Checked:
    """The frames of a file so far.

    Args:
        before: link of the header.
    """

    def __init__(self, name: str, before: int) -> None:
        self._name = name
        self._link: int | None = before
        self._since = 0
        """Offset of the last frame whose link was right, for messages."""
        self._behind_lost: dict[int, int | None] = {}
        """By offset, the link before each frame that follows dropped ones, as gaps have told."""
        self.problems: list[str] = []
        self.notes: list[str] = []

    def hole(self, hole: Hole, *, is_last: bool) -> None:
        where = f"{self._name}: {hole.end - hole.start} bytes at {hole.start}"
        if is_last:
            self.notes.append(f"{where}, the last ones, are torn, as a kill leaves them")
        else:
            self.problems.append(f"{where} are damaged")
        self._link = None  # known again with the next event

    def frame(self, frame: Frame, data: bytes) -> None:
        self._go_on(frame.offset)
        if frame.kind == EVENT and self._event(frame):
            return
        if self._link is not None:
            self._link = link(data[:FRAME_SIZE], self._link)

    def _go_on(self, offset: int) -> None:
        """Take the link before a frame that follows dropped ones."""
        for place in [each for each in self._behind_lost if each <= offset]:
            known = self._behind_lost.pop(place)
            if place == offset:
                self._link = known
            else:
                self._changed(offset)

    def _changed(self, offset: int) -> None:
        self.problems.append(
            f"{self._name}: between {self._since} and {offset} the file is not what was written: "
            "something was removed, added or changed there"
        )

    def _event(self, frame: Frame) -> bool:
        """Check an event; return whether it stands in the place of dropped frames."""
        try:
            record = journal_format.unpack_event(frame.payload)
        except ValueError:
            self.problems.append(f"{self._name}: the event at {frame.offset} is not an event")
            return False
        is_gap = bool(record["kind"] == "gap")
        if is_gap:
            lost = record["data"].get("rows")
            what = f"has cost {lost} rows" if lost else "has refused a decision, which was withdrawn,"
            self.notes.append(f"{self._name}: a full disk {what} at {frame.offset}")
        told = record.get("link")
        if told is None:
            self.problems.append(f"{self._name}: the event at {frame.offset} has lost its link")
            return is_gap
        if self._link is not None and told != f"{self._link:016x}":
            self._changed(frame.offset)
        self._since = frame.offset
        self._link = _number(told)
        if is_gap:
            self._behind_lost |= _places(record.get("goes_on"))
            self._link = None  # until a frame that it names
        return is_gap


def _places(told: object) -> dict[int, int | None]:
    found: dict[int, int | None] = {}
    for each in told if isinstance(told, list) else ():
        if isinstance(each, list) and len(each) == 2 and type(each[0]) is int:
            found[each[0]] = _number(each[1])
    return found


def _number(told: object) -> int | None:
    try:
        return int(told, 16) if isinstance(told, str) and len(told) == 16 else None
    except ValueError:
        return None
