"""What a disk may hold after a power cut, as far as POSIX promises nothing else.

The model follows strace's record of a process.  Certain are the bytes of a file at its
last fsync, and the names in a folder at its last fsync.  Of what came later, each write may be on the disk or
not, as zeros of its length, or by half, whatever became of the writes before and behind it; and
each name may be there or not.  A rename is done or not; from one folder into another the file may also have
both names, but never none.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from strace_record import Call


class Change(NamedTuple):
    """A change of a file's bytes: a write at `offset`, or with `data` None the new length `offset`."""

    offset: int
    data: bytes | None

    def applied(self, content: bytearray) -> None:
        if self.data is None:
            content[self.offset :] = bytes(max(0, self.offset - len(content)))
            return
        content.extend(bytes(max(0, self.offset - len(content))))
        content[self.offset : self.offset + len(self.data)] = self.data


@dataclass(eq=False)
class File:
    """A file: the bytes that are certain, and what was changed since."""

    certain: bytes = b""
    now: bytearray = field(default_factory=bytearray)
    changes: list[Change] = field(default_factory=list)

    def change(self, change: Change) -> None:
        change.applied(self.now)
        self.changes.append(change)

    def synced(self) -> None:
        self.certain, self.changes = bytes(self.now), []


@dataclass(eq=False)
class Folder:
    """A folder: the names that are certain, and those of now."""

    certain: dict[str, Node] = field(default_factory=dict)
    now: dict[str, Node] = field(default_factory=dict)


Node = File | Folder
Names = dict[Folder, dict[str, Node]]


@dataclass(eq=False)
class Event:
    """A change of names that is not certain: `node` gets the name `gives`, the name `takes` goes."""

    node: Node | None
    gives: tuple[Folder, str] | None = None
    takes: tuple[Folder, str] | None = None

    def give(self, names: Names) -> None:
        if self.gives is not None and self.node is not None:
            names[self.gives[0]][self.gives[1]] = self.node

    def take(self, names: Names) -> None:
        if self.takes is not None:
            folder, name = self.takes
            # by now another file may have the name
            if self.node is None or names[folder].get(name) is self.node:
                names[folder].pop(name, None)


LOST, THERE, ZEROS, HALF = "lost", "there", "zeros", "half"
EXTREMES = ((LOST, LOST), (THERE, LOST), (THERE, ZEROS), (THERE, HALF), (LOST, THERE), (THERE, THERE))
"""What becomes of all names, and of all writes, where all have the same fate."""
KILLED = len(EXTREMES) - 1
"""All is there: what a kill of the process leaves."""


class Disk:
    """Follows a record of calls, from a folder whose content is certain."""

    def __init__(self, before: Path) -> None:
        self._folders: list[Folder] = []
        self._events: list[Event] = []
        self._at: dict[int, int] = {}
        """Descriptor -> where the next write goes; -1: to the end."""
        known: dict[int, Node] = {}
        self.top = self._read(before, known)

    def _read(self, path: Path, known: dict[int, Node]) -> Folder:
        folder = self._folder()
        for one in path.iterdir():
            number = one.stat().st_ino
            if one.is_dir():
                known[number] = self._read(one, known)
            elif number not in known:
                content = one.read_bytes()
                known[number] = File(content, bytearray(content))
            folder.certain[one.name] = folder.now[one.name] = known[number]
        return folder

    def _folder(self) -> Folder:
        self._folders.append(Folder())
        return self._folders[-1]

    # ------------------------------------------------------------------------------ following

    def _find(self, path: str) -> tuple[Folder, str]:
        """The folder of a path, and the name in it."""
        *above, name = path.split("/")
        folder = self.top
        for each in above:
            inside = folder.now[each]
            assert isinstance(inside, Folder), path
            folder = inside
        return folder, name

    def follow(self, call: Call) -> None:
        """Take over what a call has changed."""
        if call.failed or call.path.endswith(" (deleted)"):
            return
        if call.path == ".":
            assert call.kind == "fsync", call
            self._sync(self.top)
            return
        folder, name = self._find(call.path)
        node = folder.now.get(name)
        if call.name.startswith("open"):
            self._at[call.descriptor] = -1 if "O_APPEND" in call.flags else 0
        if call.kind in ("create", "open"):
            if node is None:
                self._happen(Event(File(), gives=(folder, name)))
            elif "O_TRUNC" in call.flags and isinstance(node, File):
                node.change(Change(0, None))
        elif call.kind == "mkdir":
            self._happen(Event(self._folder(), gives=(folder, name)))
        elif call.kind in ("unlink", "rmdir"):
            self._happen(Event(node, takes=(folder, name)))
        elif call.kind == "rename":
            self._happen(Event(node, gives=self._find(call.target), takes=(folder, name)))
        elif call.kind == "link":
            self._happen(Event(node, gives=self._find(call.target)))
        elif call.kind == "fsync":
            assert node is not None, call
            self._sync(node)
        elif call.kind == "truncate":
            assert isinstance(node, File), call
            node.change(Change(call.offset or 0, None))
        else:
            assert call.kind == "write" and isinstance(node, File), f"what does the disk do at {call}?"
            self._write(call, node)

    def _write(self, call: Call, file: File) -> None:
        at = call.offset
        if at is None:
            at = self._at[call.descriptor]
            at = len(file.now) if at < 0 else at
            if self._at[call.descriptor] >= 0:
                self._at[call.descriptor] = at + len(call.data)
        file.change(Change(at, call.data))

    def _happen(self, event: Event) -> None:
        now = {folder: folder.now for folder in self._folders}
        event.give(now)
        event.take(now)
        self._events.append(event)

    def _sync(self, node: Node) -> None:
        if isinstance(node, File):
            node.synced()
            return
        certain = {folder: folder.certain for folder in self._folders}
        for event in list(self._events):
            taken = event.takes is not None and event.takes[0] is node
            if taken or (event.gives is not None and event.gives[0] is node):
                # a file never loses its old name before it has the new one
                event.give(certain)
                event.gives = None
            if taken:
                event.take(certain)
                event.takes = None
            if event.gives is None and event.takes is None:
                self._events.remove(event)

    # ------------------------------------------------------------------------------ states

    def state(self, draw: random.Random, fates: tuple[str, str] | None = None) -> State:
        """What the disk may hold if the power goes now.

        Args:
            draw: chooses where no fate is given.
            fates: of all names and of all writes, see `EXTREMES`.
        """
        names = {folder: dict(folder.certain) for folder in self._folders}
        for event in self._events:
            fate = draw.choice((LOST, THERE, HALF)) if fates is None else fates[0]
            if fate != LOST:
                event.give(names)
            # by half: of a rename into another folder, both names
            within = event.gives is None or event.takes is None or event.gives[0] is event.takes[0]
            if fate == THERE or (fate == HALF and within):
                event.take(names)
        contents: dict[File, bytes] = {}
        found = State()

        def look(folder: Folder, where: str) -> None:
            for name, node in names[folder].items():
                if isinstance(node, Folder):
                    found[where + name] = None
                    look(node, f"{where}{name}/")
                    continue
                if node not in contents:
                    content = bytearray(node.certain)
                    for change in node.changes:
                        fate = draw.choice((LOST, THERE, ZEROS, HALF)) if fates is None else fates[1]
                        _befall(change, content, fate)
                    contents[node] = bytes(content)
                found[where + name] = contents[node]

        look(self.top, "")
        return found


def _befall(change: Change, content: bytearray, fate: str) -> None:
    """Let a change reach the disk, or not."""
    offset, data = change
    if fate == LOST:
        return
    if data is None or fate == THERE:
        change.applied(content)
    elif fate == ZEROS:
        Change(offset, bytes(len(data))).applied(content)
    else:
        Change(offset, data[: len(data) // 2]).applied(content)


class State(dict[str, bytes | None]):
    """A content of the disk: of files by their paths; None is a folder."""

    def build(self, target: Path) -> None:
        """Make the files and folders."""
        target.mkdir()
        for path, content in sorted(self.items()):
            if content is None:
                (target / path).mkdir()
            else:
                (target / path).write_bytes(content)

    def listed(self, folder: str) -> set[str]:
        """The names in a folder; none if it is not there."""
        return {path.rpartition("/")[2] for path in self if path.rpartition("/")[0] == folder}


class Cut(NamedTuple):
    """A power cut before call number `at` of a record.

    Attributes:
        number: which state of those that are possible there.
        state: what the disk holds.
        least: what is certain.
    """

    at: int
    number: int
    state: State
    least: State


def cuts(disk: Disk, calls: Sequence[Call], seed: int, each: int, some: Container[int]) -> Iterator[Cut]:
    """Different states, up to `each` of every instant of a record and of its end.

    Args:
        disk: as it was at the beginning; it follows the calls.
        seed: the choice of the states follows from it.
        some: the states that are wanted, of (calls + 1) * `each`.
    """
    met = set[int]()
    for at, call in enumerate([*calls, None]):
        least = disk.state(random.Random(0), EXTREMES[0])
        certain = hash(frozenset(least.items()))
        for number in range(each):
            if at * each + number not in some:
                continue
            draw = random.Random(f"{seed} {at} {number}")
            state = disk.state(draw, EXTREMES[number] if number < len(EXTREMES) else None)
            # the same files are another case where more is certain
            if (found := hash((frozenset(state.items()), certain))) not in met:
                met.add(found)
                yield Cut(at, number, state, least)
        if call is not None:
            disk.follow(call)


# ------------------------------------------------------------------------------------ hazards


COVERED = {
    "open": {"create"},
    "write": {"write"},
    "fsync": {"fsync"},
    "fsync_folder": {"fsync"},
    "rename": {"rename", "link"},
    "mkdir": {"mkdir"},
    "link": {"link"},
    "unlink": {"unlink"},
    "rmtree": {"unlink", "rmdir"},
    "truncate": {"truncate"},
    # one operation each, of several calls
    "create": {"mkdir", "unlink", "create", "write", "map"},
    "log": {"mkdir", "create", "write"},
}
"""Classes of calls that a hazard of this last name announces."""


def unannounced(calls: Iterable[Call]) -> set[str]:
    """The roles of calls before which no hazard of their class stands."""
    return {
        call.role
        for call in calls
        if not call.failed
        and call.kind != "open"
        and call.kind not in COVERED.get(call.hazard.rpartition(".")[2], ())
    }
