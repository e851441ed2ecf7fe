"""A mirror as one start holds it: its lists in their order, uploads, and deletions after them."""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from everstep.errors import DamagedCheckpointError, MirrorError, RunLockedError
from everstep.hazard import reach
from everstep.mirror.contents import Contents, Holder, Part, number_of, parse
from everstep.mirror.place import PART_BYTES, Place

SMALL = 8 << 20
"""Bytes from which the last part of a journal is left alone; a smaller part is replaced by a longer one."""


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
    """What a run directory has committed.

    Attributes:
        files: by path, relative to the run directory.
        notes: content of the small files by path, each byte as a character.
        ended: whether the start says that it ended.
        wholes: for each checkpoint the paths of its files.
    """

    files: Mapping[str, Source]
    notes: Mapping[str, str]
    ended: bool = False
    wholes: Collection[frozenset[str]] = ()


class Mirror:
    """Lists and files at a place.  One thread at a time calls it.

    Args:
        place: where it lies.

    Attributes:
        contents: the newest whole list, as last read or written; None in an empty mirror.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.contents: Contents | None = None
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
            found = self.place.keys("contents")
            numbers = {number: key for key in found if (number := number_of(key)) is not None}
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

    # ------------------------------------------------------------------------------- generations

    def take(self, run: dict[str, Any], directory: Path) -> Holder | None:
        """Take the mirror over: an earlier start that still runs is refused at its next upload.

        Args:
            run: the content of the run's `run.json`.
            directory: the run directory.

        Returns:
            The holder before, None if there was none.
        """
        before = self.contents
        me = Holder(self._token, platform.node(), os.getpid(), str(directory))
        if before is None:
            new = Contents(self._last + 1, run, 1, me, time.time())
        else:
            new = before.after(
                self._last + 1, generation=before.generation + 1, holder=me, created=time.time()
            )
        try:
            self._append(new)
        except RunLockedError as error:
            raise MirrorError(
                f"{error}; it did so while this start was opened: stop the other one, or start again"
            ) from None
        self._clean()
        return None if before is None else before.holder

    def _append(self, new: Contents) -> None:
        """Write the next list, and read it back: it counts only as the newest one."""
        for _ in range(3):
            reach("mirror.contents")
            self.place.create(new.key, new.packed())
            found = self.look()
            if found is None or found.holder.token != self._token:
                raise RunLockedError(self._taken(found))
            if found.packed() == new.packed():
                return
            # an earlier attempt, whose answer was lost, has the number
            new = new.after(self._last + 1)
        raise MirrorError(
            f"the mirror {self.place.name} does not keep the lists of contents that it accepts: give another"
        )

    def _taken(self, found: Contents | None) -> str:
        if found is None:
            return f"the mirror {self.place.name} was emptied by somebody else"
        who = f"process {found.holder.pid} on host {found.holder.host}, in {found.holder.directory}"
        return f"the mirror {self.place.name} was taken over by {who}"

    def _clean(self) -> None:
        """Delete what no list refers to: uploads that a kill has cut off, and lists before the last two."""
        assert self.contents is not None
        reach("mirror.list")
        needed = self.contents.keys()
        self._garbage |= {key for key in self.place.keys("files") if key not in needed}
        for key in self.place.keys("contents"):
            number = number_of(key)
            if number is None or number < self.contents.number - 1:
                self._garbage.add(key)
        self._delete()

    # ----------------------------------------------------------------------------------- uploads

    def upload(self, committed: Committed, go_on: Callable[[], bool] = lambda: True) -> list[str]:
        """Make the mirror hold exactly this, then delete what it does not need any more.

        Args:
            go_on: asked before each file; False ends the upload.

        Returns:
            Sentences for the user: on local files that are damaged, and left out; on what the mirror lost.
        """
        before = self.contents
        if before is None or before.holder.token != self._token:
            raise RunLockedError(self._taken(before))
        self._delete()
        held, said = self._held(before)
        number = self._last + 1
        files: dict[str, tuple[Part, ...]] = {}
        lost: dict[str, str] = {}
        # what several checkpoints share has a name in the folder of each, and is uploaded once
        equal = {parts[0][1:]: parts for parts in held.values() if len(parts) == 1}
        for path, source in committed.files.items():
            try:
                parts = equal.get((source.bytes, source.digest or ""), held.get(path, ()))
                files[path] = self._stored(path, source, parts, number, go_on)
                equal |= {parts[0][1:]: parts for parts in [files[path]] if len(parts) == 1}
            except (DamagedCheckpointError, FileNotFoundError) as error:
                if source.digest is None or (isinstance(error, FileNotFoundError) and source.path.exists()):
                    raise
                lost[path] = "" if isinstance(error, FileNotFoundError) else str(error)
        self._list(before, committed, _in_wholes(committed, files))
        name = self.place.name
        return said + [f"not in the mirror {name}: {told}" for told in lost.values() if told]

    def _held(self, before: Contents) -> tuple[dict[str, tuple[Part, ...]], list[str]]:
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

    def _list(self, before: Contents, committed: Committed, files: dict[str, tuple[Part, ...]]) -> None:
        """Write the list that has these files, then delete what it does not refer to."""
        holder = replace(before.holder, ended=committed.ended)
        new = {"files": files, "notes": dict(committed.notes), "holder": holder}
        if new == {name: getattr(before, name) for name in new}:
            return
        self._append(before.after(self._last + 1, created=time.time(), **new))
        assert self.contents is not None
        self._garbage |= (before.keys() | set(self._ready)) - self.contents.keys()
        self._garbage.add(replace(before, number=before.number - 1).key)
        self._ready.clear()
        self._delete()

    def _stored(
        self, path: str, source: Source, held: tuple[Part, ...], number: int, go_on: Callable[[], bool]
    ) -> tuple[Part, ...]:
        """Return the parts of a file in the mirror; what is missing there is uploaded."""
        if source.digest is not None:
            if len(held) == 1 and held[0][1:] == (source.bytes, source.digest):
                return held
            return (self._put_whole(f"files/{number:08d}/{path}", source, go_on),)
        kept, at = _kept(held, source.bytes)
        while at < source.bytes:
            end = min(at + PART_BYTES, source.bytes)
            kept += (self._put(f"files/{number:08d}/{path}.{at}-{end}", source, at, end, go_on),)
            at = end
        return kept

    def _put_whole(self, key: str, source: Source, go_on: Callable[[], bool]) -> Part:
        """Upload a file of known content."""
        try:
            part = self._put(key, source, 0, source.bytes, go_on)
        except EOFError as error:
            raise DamagedCheckpointError(f"{source.path} is damaged: {error}") from None
        if part.digest != source.digest:
            raise DamagedCheckpointError(
                f"{source.path} is damaged: its checksum is {part.digest}, not {source.digest}"
            )
        return part

    def _put(self, key: str, source: Source, start: int, end: int, go_on: Callable[[], bool]) -> Part:
        if key in self._ready and source.digest in (None, self._ready[key].digest):
            return self._ready[key]
        if not go_on():
            raise InterruptedError(f"the upload of {key} was given up")
        reach("mirror.put")
        digest = self.place.put(key, source.path, start, end)
        part = self._ready[key] = Part(key, end - start, digest)
        return part

    def _delete(self) -> None:
        """Delete what is not needed; what cannot be deleted now is deleted later."""
        for key in sorted(self._garbage):
            reach("mirror.delete")
            self.place.delete(key)
            self._garbage.discard(key)


def _in_wholes(committed: Committed, files: dict[str, tuple[Part, ...]]) -> dict[str, tuple[Part, ...]]:
    """Leave out checkpoints that are not there whole, and what only they refer to."""
    whole: set[str] = set().union(*(paths for paths in committed.wholes if paths <= files.keys()))
    some: set[str] = set().union(*committed.wholes)
    return {path: parts for path, parts in files.items() if path in whole or path not in some}


def _kept(held: tuple[Part, ...], size: int) -> tuple[tuple[Part, ...], int]:
    """Return the parts of a journal of `size` bytes that stay, and the offset at which they end."""
    if sum(part.bytes for part in held) >= size:  # more: the local file was damaged since
        return held, size
    if held and held[-1].bytes < SMALL:
        held = held[:-1]
    return held, sum(part.bytes for part in held)
