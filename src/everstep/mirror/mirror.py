"""A mirror as one start holds it: its lists of contents in their order, uploads, and deletions after them.

A list of contents says which bytes in the mirror are which file of the run:

    contents/00000007.json      {"checksum": ..., "body": {...}}: one list; the newest whole list counts
    files/00000007/PATH         files that were uploaded for list 7

Nothing in a mirror is ever changed: an upload adds files, then a list with the next number, which some stores
create only if nobody else has created that number.  So the mirror is a whole run at every instant, and a list
is also the answer to "am I still the last?".  The body of a list has:

    format, number              version of this form, number of the list
    run                         the content of the run's `run.json`
    holder                      who has taken the mirror over last, see `Holder`
    files                       {PATH: [[KEY, BYTES, XXH3_128], ...]}: the parts of each file, in their order
    notes                       {PATH: TEXT}: files so small that the list has them, each byte as a character

A checkpoint's file is one part.  A journal grows, so it is cut into parts.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import xxhash

from everstep.errors import DamagedCheckpointError, MirrorError, RunLockedError
from everstep.hazard import reach
from everstep.mirror.place import PART_BYTES, Place
from everstep.untrusted_files import Count, is_file_name, misfits, parse_json

FORMAT = 2
"""Version of a list, as written."""

FOLDERS = ("checkpoints", "best", "journal")
"""Folders of a run directory of which a mirror has files."""
NOTES = ("checkpoint", "labels.json", "pins.json")
"""Small files of a run directory that a list has."""

_LIST = re.compile(rb'\{"checksum":"([0-9a-f]{32})","body":(\{.*\})\}\n', re.DOTALL)
_NUMBER = re.compile(r"contents/([0-9]{8,})\.json")
_SHAPE: dict[str, Any] = {
    "number": Count,
    "run": dict,
    "notes": dict[str, str],
    "files": dict[str, list[tuple[str, Count, str]]],
    "holder": {"token": str, "host": str, "pid": Count, "directory": str, "ended": bool},
}


class Part(NamedTuple):
    """Bytes of a file, or of a part of it: their key in the mirror, their number, their xxh3_128."""

    key: str
    bytes: int
    digest: str


@dataclass(frozen=True)
class Holder:
    """Start that has taken the mirror over: a random token, where it runs, whether it said that it ended."""

    token: str
    host: str
    pid: int
    directory: str
    ended: bool = False


@dataclass(frozen=True)
class Contents:
    """List of contents, as the module's description says."""

    number: int
    run: dict[str, Any]
    holder: Holder
    files: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"contents/{self.number:08d}.json"

    def keys(self) -> set[str]:
        return {part.key for parts in self.files.values() for part in parts}

    def size(self, path: str) -> int:
        """Number of bytes of a file; 0 if the mirror has no such file."""
        return sum(part.bytes for part in self.files.get(path, ()))

    def packed(self) -> bytes:
        body = {"format": FORMAT, **asdict(self), "files": {path: list(p) for path, p in self.files.items()}}
        text = json.dumps(body, separators=(",", ":")).encode()
        return b'{"checksum":"%s","body":%s}\n' % (xxhash.xxh3_128_hexdigest(text).encode(), text)


def number_of(key: str) -> int | None:
    """Parse the number in the key of a list; None for any other key."""
    match = _NUMBER.fullmatch(key)
    return int(match[1]) if match else None


def parse(data: bytes, mirror: str) -> Contents | None:
    """Read a list of contents of a mirror; None if it is torn or damaged."""
    match = _LIST.fullmatch(data)
    if match is None or xxhash.xxh3_128_hexdigest(match[2]).encode() != match[1]:
        return None
    try:
        body = parse_json(match[2])
        if body.pop("format") != FORMAT or any(misfits(body, _SHAPE)):
            raise ValueError(f"it is not a list of format {FORMAT}")
        files = {path: tuple(Part(*part) for part in parts) for path, parts in body["files"].items()}
        contents = Contents(**body | {"files": files, "holder": Holder(**body["holder"])})
        "".join(contents.notes.values()).encode("latin-1")  # each character is a byte
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MirrorError(
            f"the mirror {mirror} has a list of contents that this everstep cannot read ({error!r:.200}): "
            "nothing was taken from it; give another mirror"
        ) from error
    # it may come from anybody: a path could lead out of the run directory, a key out of the mirror
    faults = [path for path in files if path.split("/")[0] not in FOLDERS]
    faults += [path for path in (*files, *contents.keys()) if not all(map(is_file_name, path.split("/")))]
    faults += [name for name in contents.notes if name not in NOTES]
    if faults:
        raise MirrorError(
            f"the mirror {mirror} names {faults[0]!r:.200}, which is not a file of a run; give another mirror"
        )
    return contents


SMALL = 8 << 20
"""Bytes from which the last part of a journal is left alone; a smaller part is replaced by a longer one."""

Parts: TypeAlias = tuple[Part, ...]


class Source(NamedTuple):
    """File of the run directory: how many bytes of it are committed, and their xxh3_128.

    A journal, which grows and is cut into parts, has no digest.
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
    """Lists and files at a place.  One thread at a time calls it."""

    def __init__(self, place: Place) -> None:
        self.place, self._name = place, f"the mirror {place.name}"
        self.contents: Contents | None = None
        """The newest whole list, as last read or written; None in an empty mirror."""
        self.is_over = False
        """Set by any thread: an upload that runs is given up before its next file."""
        self._last = 0
        """Number of the newest list that was ever seen, whole or not."""
        self._token = secrets.token_hex(8)
        self._unlisted: dict[str, Part] = {}
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
                    f"{self._name} has {len(numbers)} lists of contents and none is whole: "
                    "give another mirror, or delete this one if nothing in it is needed"
                )
            return None

    def take_over(self, run: dict[str, Any], directory: Path) -> Holder | None:
        """Take the mirror over: an earlier start that still runs is refused at its next upload."""
        earlier = self.contents
        me = Holder(self._token, platform.node(), os.getpid(), str(directory))
        new = Contents(self._last + 1, run, me)
        if earlier is not None:
            new = replace(earlier, number=new.number, holder=me)
        try:
            self._append(new)
        except RunLockedError as error:
            raise MirrorError(
                f"{error} (while this start was opened); stop the other one, or start again"
            ) from None
        # uploads that a kill has cut off, and lists before the last two
        reach("mirror.list")
        lists = self.place.keys("contents")
        self._garbage |= self.place.keys("files").keys() - new.keys()
        self._garbage |= {key for key in lists if (number_of(key) or 0) < self._last - 1}
        self._delete()
        return None if earlier is None else earlier.holder

    def _append(self, new: Contents) -> None:
        """Write the next list, and read it back: it counts only as the newest one."""
        for _ in range(3):
            reach("mirror.contents")
            self.place.create(new.key, new.packed())
            if self._require_held(self.look()).packed() == new.packed():
                return
            # an earlier attempt, whose answer was lost, has the number
            new = replace(new, number=self._last + 1)
        raise MirrorError(f"{self._name} does not keep the lists of contents that it accepts: give another")

    def _require_held(self, newest: Contents | None) -> Contents:
        if newest is None:
            raise RunLockedError(f"{self._name} was emptied by somebody else: start again")
        holder = newest.holder
        if holder.token != self._token:
            other = f"process {holder.pid} on host {holder.host}, in {holder.directory}"
            raise RunLockedError(f"{self._name} was taken over by {other}")
        return newest

    def upload(self, committed: Committed) -> list[str]:
        """Make the mirror hold exactly this, and delete the rest; return sentences for the user."""
        contents = self._require_held(self.contents)
        self._delete()
        present, problems = self._present_parts(contents)
        files: dict[str, Parts] = {}
        gaps: set[str] = set()
        for path, source in committed.files.items():
            folder = path.rpartition("/")[0]
            try:
                key = f"files/{self._last + 1:08d}/{path}"
                files[path] = self._upload_source(key, source, present.get(path, ()))
            except DamagedCheckpointError as error:
                problems.append(f"not in {self._name}: {error}")
                gaps.add(folder)
            except FileNotFoundError:
                if source.digest is None or source.path.exists():
                    raise
                gaps.add(folder)  # retention has deleted it
        # no checkpoint is listed that lacks a file
        files = {path: parts for path, parts in files.items() if path.rpartition("/")[0] not in gaps}
        holder = replace(contents.holder, ended=committed.ended)
        new = replace(contents, files=files, notes=dict(committed.notes), holder=holder)
        if new != contents:
            self._append(replace(new, number=self._last + 1))
            self._garbage |= (contents.keys() | set(self._unlisted)) - new.keys()
            self._garbage.add(replace(contents, number=contents.number - 1).key)
            self._unlisted.clear()
            self._delete()
        return problems

    def _present_parts(self, contents: Contents) -> tuple[dict[str, Parts], list[str]]:
        """Return what the mirror has of its list, and a sentence if that is not all.

        A disk may have been replaced by an empty one, and a rule of a store may delete old objects.
        """
        reach("mirror.list")
        sizes = self.place.keys("files")
        self._unlisted = {key: part for key, part in self._unlisted.items() if sizes.get(key) == part.bytes}
        present = {
            path: tuple(takewhile(lambda part: sizes.get(part.key) == part.bytes, parts))
            for path, parts in contents.files.items()
        }
        count = sum(present[path] != parts for path, parts in contents.files.items())
        sentence = f"{self._name} has lost {count} of its files, which are uploaded again"
        return present, [sentence] if count else []

    def _upload_source(self, key: str, source: Source, parts: Parts) -> Parts:
        if source.digest is None:
            if sum(part.bytes for part in parts) < source.bytes and parts and parts[-1].bytes < SMALL:
                parts = parts[:-1]
            at = sum(part.bytes for part in parts)
            ends = [*range(at, source.bytes, PART_BYTES), source.bytes]
            new = [self._put(f"{key}.{at}-{end}", source, at, end) for at, end in pairwise(ends)]
            return (*parts, *new)
        if len(parts) == 1 and parts[0][1:] == (source.bytes, source.digest):
            return parts
        try:
            part = self._put(key, source, 0, source.bytes)
        except EOFError as error:
            raise DamagedCheckpointError(f"{source.path} is damaged: {error}") from None
        if part.digest != source.digest:
            digests = f"{part.digest}, not {source.digest}"
            raise DamagedCheckpointError(f"{source.path} is damaged: its checksum is {digests}")
        return (part,)

    def _put(self, key: str, source: Source, start: int, end: int) -> Part:
        if key in self._unlisted and source.digest in (None, self._unlisted[key].digest):
            return self._unlisted[key]
        if self.is_over:
            raise InterruptedError(f"the upload of {key} was given up")
        reach("mirror.put")
        part = self._unlisted[key] = Part(key, end - start, self.place.put(key, source.path, start, end))
        return part

    def _delete(self) -> None:
        """Delete what is not needed; what cannot be deleted now is deleted later."""
        for key in sorted(self._garbage):
            reach("mirror.delete")
            self.place.delete(key)
            self._garbage.discard(key)
