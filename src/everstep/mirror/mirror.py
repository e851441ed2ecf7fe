"""A mirror as one start holds it: its lists in their order, uploads, and deletions after them."""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from everstep.errors import DamagedCheckpointError, MirrorError, RunLockedError
from everstep.hazard import reach
from everstep.mirror.contents import Contents, Holder, Part, number_of, parse
from everstep.mirror.place import PART_BYTES, Place

SMALL = 8 << 20
"""Bytes from which the last part of a journal is left alone; a smaller part is replaced by a longer one."""

Parts: TypeAlias = tuple[Part, ...]


class Source(NamedTuple):
    """File of the run directory that belongs to what is committed.

    Attributes:
        path: the local file.
        bytes: how many bytes of it belong to what is committed.
        digest: their xxh3_128; None for a journal, which grows and is cut into parts.
    """

    path: Path
    bytes: int
    digest: str | None


class Committed(NamedTuple):
    """What a run directory has committed: files and small files by path; whether the start has ended."""

    files: Mapping[str, Source]
    notes: Mapping[str, str]
    ended: bool = False


class Mirror:
    """Lists and files at a place.  One thread at a time calls it.

    Attributes:
        contents: the newest whole list, as last read or written; None in an empty mirror.
        is_over: set by any thread: an upload that runs is given up before its next file.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.contents: Contents | None = None
        self.is_over = False
        self._last = 0
        """Number of the newest list that was ever seen, whole or not."""
        self._token = secrets.token_hex(8)
        self._ready: dict[str, Part] = {}
        """What was uploaded and is in no list yet, by key: a failed upload goes on where it ended."""
        self._garbage: set[str] = set()

    def look(self) -> Contents | None:
        """Read the newest whole list."""
        while True:
            reach("mirror.list")
            keys = self.place.keys("contents")
            numbers = {number: key for key in keys if (number := number_of(key)) is not None}
            self._last = max([self._last, *numbers])
            try:
                for number in sorted(numbers, reverse=True):
                    reach("mirror.read")
                    contents = parse(self.place.read(numbers[number]), self.place.name)
                    if contents is not None and contents.number == number:
                        self.contents = contents
                        return contents
            except FileNotFoundError:
                continue  # its writer has written newer lists meanwhile, and deletes old ones
            if numbers:
                raise MirrorError(
                    f"the mirror {self.place.name} has {len(numbers)} lists of contents and none is whole: "
                    "give another mirror, or delete this one if nothing in it is needed"
                )
            return None

    def take(self, run: dict[str, Any], directory: Path) -> Holder | None:
        """Take the mirror over: an earlier start that still runs is refused at its next upload."""
        before = self.contents
        me = Holder(self._token, platform.node(), os.getpid(), str(directory))
        new = Contents(self._last + 1, run, 1, me, time.time())
        if before is not None:
            generation = before.generation + 1
            new = replace(new, run=before.run, generation=generation, files=before.files, notes=before.notes)
        try:
            self._append(new)
        except RunLockedError as error:
            raise MirrorError(
                f"{error}; it did so while this start was opened: stop the other one, or start again"
            ) from None
        # uploads that a kill has cut off, and lists before the last two
        reach("mirror.list")
        self._garbage |= self.place.keys("files").keys() - new.keys()
        self._garbage |= {
            key for key in self.place.keys("contents") if (number_of(key) or 0) < self._last - 1
        }
        self._delete()
        return None if before is None else before.holder

    def _append(self, new: Contents) -> None:
        """Write the next list, and read it back: it counts only as the newest one."""
        for _ in range(3):
            reach("mirror.contents")
            self.place.create(new.key, new.packed())
            found = self.look()
            self._require_held(found)
            if found is not None and found.packed() == new.packed():
                return
            # an earlier attempt, whose answer was lost, has the number
            new = replace(new, number=self._last + 1)
        raise MirrorError(
            f"the mirror {self.place.name} does not keep the lists of contents that it accepts: give another"
        )

    def _require_held(self, newest: Contents | None) -> None:
        if newest is None:
            raise RunLockedError(f"the mirror {self.place.name} was emptied by somebody else: start again")
        holder = newest.holder
        if holder.token != self._token:
            raise RunLockedError(
                f"the mirror {self.place.name} was taken over by process {holder.pid} on host {holder.host}, "
                f"in {holder.directory}"
            )

    def upload(self, committed: Committed) -> list[str]:
        """Make the mirror hold exactly this, and delete the rest; return sentences for the user."""
        before = self.contents
        self._require_held(before)
        assert before is not None
        self._delete()
        held, problems = self._held(before)
        files: dict[str, Parts] = {}
        # what several checkpoints share has a name in the folder of each, and is uploaded once
        equal = {parts[0][1:]: parts for parts in held.values() if len(parts) == 1}
        lost: set[str] = set()
        for path, source in committed.files.items():
            folder = path.rpartition("/")[0]
            try:
                parts = equal.get((source.bytes, source.digest or ""), held.get(path, ()))
                files[path] = parts = self._stored(f"files/{self._last + 1:08d}/{path}", source, parts)
                equal |= {parts[0][1:]: parts} if len(parts) == 1 else {}
            except DamagedCheckpointError as error:
                problems.append(f"not in the mirror {self.place.name}: {error}")
                lost.add(folder)
            except FileNotFoundError:
                if source.digest is None or source.path.exists():
                    raise
                lost.add(folder)  # retention has deleted it
        # no checkpoint is listed that lacks a file
        self._list(before, committed, {p: f for p, f in files.items() if p.rpartition("/")[0] not in lost})
        return problems

    def _held(self, before: Contents) -> tuple[dict[str, Parts], list[str]]:
        """Return what the mirror has of its list, and a sentence if that is not all.

        A disk may have been replaced by an empty one, and a rule of a store may delete old objects.
        """
        reach("mirror.list")
        there = self.place.keys("files")
        self._ready = {key: part for key, part in self._ready.items() if there.get(key) == part.bytes}
        held = {
            path: tuple(takewhile(lambda part: there.get(part.key) == part.bytes, parts))
            for path, parts in before.files.items()
        }
        count = sum(held[path] != parts for path, parts in before.files.items())
        lost = f"the mirror {self.place.name} has lost {count} of its files, which are uploaded again"
        return held, [lost] if count else []

    def _list(self, before: Contents, committed: Committed, files: dict[str, Parts]) -> None:
        """Write the list that has these files, then delete what it does not refer to."""
        holder = replace(before.holder, ended=committed.ended)
        new = replace(before, files=files, notes=dict(committed.notes), holder=holder)
        if new == before:
            return
        self._append(replace(new, number=self._last + 1, created=time.time()))
        self._garbage |= (before.keys() | set(self._ready)) - new.keys()
        self._garbage.add(replace(before, number=before.number - 1).key)
        self._ready.clear()
        self._delete()

    def _stored(self, key: str, source: Source, held: Parts) -> Parts:
        if source.digest is None:
            at = sum(part.bytes for part in held)
            if at < source.bytes and held and held[-1].bytes < SMALL:
                held = held[:-1]
                at = sum(part.bytes for part in held)
            ends = [*range(at, source.bytes, PART_BYTES), source.bytes]
            new = [self._put(f"{key}.{at}-{end}", source, at, end) for at, end in pairwise(ends)]
            return (*held, *new)
        if len(held) == 1 and held[0][1:] == (source.bytes, source.digest):
            return held
        try:
            part = self._put(key, source, 0, source.bytes)
        except EOFError as error:
            raise DamagedCheckpointError(f"{source.path} is damaged: {error}") from None
        if part.digest != source.digest:
            raise DamagedCheckpointError(
                f"{source.path} is damaged: its checksum is {part.digest}, not {source.digest}"
            )
        return (part,)

    def _put(self, key: str, source: Source, start: int, end: int) -> Part:
        if key in self._ready and source.digest in (None, self._ready[key].digest):
            return self._ready[key]
        if self.is_over:
            raise InterruptedError(f"the upload of {key} was given up")
        reach("mirror.put")
        part = self._ready[key] = Part(key, end - start, self.place.put(key, source.path, start, end))
        return part

    def _delete(self) -> None:
        """Delete what is not needed; what cannot be deleted now is deleted later."""
        for key in sorted(self._garbage):
            reach("mirror.delete")
            self.place.delete(key)
            self._garbage.discard(key)
