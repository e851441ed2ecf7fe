"""Content of arrays, recognised by its digest: what is equal is written once.

Within a checkpoint, an array that is equal to another one is not written.  Between checkpoints, an array that
is equal to one of the newest checkpoint is written into a shared file; and no more at the saves that follow,
while it stays equal.  So no save writes more bytes than one that shares nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from everstep.checkpoint.array_file import Record, ordered
from everstep.checkpoint.audit import Audit
from everstep.checkpoint.description import describe, pieces_of
from everstep.checkpoint.shared import (
    FOLDER,
    HERE,
    Flaw,
    copy_of,
    have_two,
    is_shared,
    link_here,
    make_folder,
    mend,
    what,
    write_shared,
)
from everstep.contracts.state import HostArray, Json
from everstep.state import content_digest

LEAST = 4096
"""Bytes from which on an array is compared with others: for less, a reference costs more than the content."""
LEAST_FILE = 1 << 16
"""Bytes from which on a shared file is worth its two fsyncs."""
_UP = f"../../{FOLDER}"

Content: TypeAlias = tuple[str, str, tuple[int, ...]]
"""What makes two arrays equal: the digest of their bytes, the element type, and the shape."""


class Place(NamedTuple):
    """Place of an array's bytes: the array `key` of `file`."""

    file: str
    key: str


class Known(NamedTuple):
    """Arrays of one tree of a checkpoint, as far as they can be shared.

    Attributes:
        places: the place of each content.
        files: the record of each shared file.
    """

    places: dict[Content, Place]
    files: dict[str, Record]

    @classmethod
    def of(cls, file: str, described: Mapping[str, Any], files: Mapping[str, Record]) -> Known:
        """Take what can be shared from the descriptions of a tree whose own file is `file`."""
        places = {}
        for name, facts in described.items():
            for piece in pieces_of(name, facts, file):
                if "xxh3_128" in piece and facts["bytes"] >= LEAST:
                    content = piece["xxh3_128"], facts["dtype"], tuple(piece["shape"])
                    places[content] = Place(piece["file"], piece["key"])
        return cls(places, {name: record for name, record in files.items() if is_shared(record)})


class Layout(NamedTuple):
    """Division of a tree's arrays among files.

    Attributes:
        here: the arrays that are to be written into the tree's own file.
        described: the description of each array, for the manifest.
        files: the record of each shared file that the descriptions name.
    """

    here: dict[str, HostArray]
    described: dict[str, dict[str, Json]]
    files: dict[str, Record]


class Sharing:
    """What the saves of one process share, each with the one before.

    A stale memory does no harm: before a shared file is referred to, both copies are on the disk.

    Args:
        run_dir: the run directory.
        before: returns, by a tree's own file, what the newest checkpoint has; asked once for each tree.
        say: takes sentences about damage for the user.

    Attributes:
        unfinished: whether a save has begun and not ended.
    """

    def __init__(
        self, run_dir: Path, before: Callable[[str], Known | None], say: Callable[[str], None]
    ) -> None:
        self._folder, self._before, self._say = run_dir / FOLDER, before, say
        self._audits: dict[str, Audit] = defaultdict(Audit)
        """By a tree's own file: each tree refers to shared files of its own."""
        self._known: dict[str, Known | None] = {}
        self._new: dict[str, Known] = {}
        self._save = ""
        self.unfinished = False

    def make_folder(self) -> None:
        """Make the folder of the shared files, which ranks otherwise make at the same time."""
        make_folder(self._folder)

    def begin(self, save: str) -> None:
        """Begin the save of the checkpoint of this name."""
        self._save, self._new, self.unfinished = save, {}, True

    def end(self, *, committed: bool) -> None:
        """End the save; `committed` tells whether its files became a checkpoint."""
        if committed:
            self._known |= self._new
        self.unfinished = False

    def share(
        self, file: str, arrays: Mapping[Content, tuple[str, HostArray]]
    ) -> tuple[dict[Content, Place], dict[str, Record]]:
        """Find or make places in shared files for arrays of a tree; the other arrays are new.

        Args:
            file: the tree's own file.
            arrays: name and array by content, from `LEAST` bytes on.

        Returns:
            Places, and the records of the files that they are in.
        """
        known = self._known_of(file, arrays)
        places, files = self._referred(file, known, arrays)
        again = {
            name: array
            for content, (name, array) in arrays.items()
            if content in known.places and known.places[content].file not in known.files
        }
        if sum(array.nbytes for array in again.values()) >= LEAST_FILE:
            new, record = write_shared(self._folder, self._save, again)
            files[new] = {**record, FOLDER: _UP}
            places |= {c: Place(new, name) for c, (name, _) in arrays.items() if name in again}
        return places, files

    def _known_of(self, file: str, arrays: Mapping[Content, tuple[str, HostArray]]) -> Known:
        if file not in self._known and arrays:
            self._known[file] = self._before(file)
        return self._known.get(file) or Known({}, {})

    def linked(
        self, file: str, arrays: Mapping[Content, tuple[str, HostArray]], folder: Path
    ) -> tuple[dict[Content, Place], dict[str, Record]]:
        """Find places as `share` does, in shared files that get names in `folder`, too; makes no new ones."""
        wanted, found = self._in_use(self._known_of(file, arrays), arrays)
        damaged, files = self._audits[file].is_damaged, dict[str, Record]()
        for name, record in found.items():
            path = self._folder / name
            if not (damaged(path) or damaged(copy_of(path))) and link_here(path, folder):
                files[name] = {**record, FOLDER: HERE}
        return {c: place for name in files for c, place in wanted[name].items()}, files

    def _in_use(
        self, known: Known, arrays: Mapping[Content, tuple[str, HostArray]]
    ) -> tuple[dict[str, dict[Content, Place]], dict[str, Record]]:
        """Find the places in shared files, and the files of which half is used and both copies are there."""
        wanted: dict[str, dict[Content, Place]] = defaultdict(dict)
        for content in arrays:
            if content in known.places and known.places[content].file in known.files:
                wanted[known.places[content].file][content] = known.places[content]
        files = {}
        for file, inside in wanted.items():
            record = known.files[file]
            used = sum(arrays[content][1].nbytes for content in inside)
            if 2 * used >= record["bytes"] and have_two(self._folder / file, record):
                files[file] = record
        return wanted, files

    def _referred(
        self, tree: str, known: Known, arrays: Mapping[Content, tuple[str, HostArray]]
    ) -> tuple[dict[Content, Place], dict[str, Record]]:
        """Find the places in the shared files of the save before.

        A file that is hardly used any more, is lost, or is found damaged beyond repair gives none: its
        content counts as new.
        """
        wanted, files = self._in_use(known, arrays)
        audit = self._audits[tree]
        for file, flaw in self._flaws(audit, files).items():
            whole, told = mend(flaw, {place.key: arrays[c][1] for c, place in wanted[file].items()})
            self._say(told)
            if whole:
                audit.made_again(flaw.path, flaw.whole)
            else:
                # the audit still knows the flaw: if this save fails, the next one asks for the file again
                del files[file]
        return {c: place for file in files for c, place in wanted[file].items()}, files

    def _flaws(self, audit: Audit, files: Mapping[str, Record]) -> dict[str, Flaw]:
        """Read on in both copies of shared files; returns a damaged copy of each file that has one."""
        pairs = {file: (self._folder / file, copy_of(self._folder / file)) for file in files}
        found = audit.damaged({copy: files[file] for file, pair in pairs.items() for copy in pair})
        return {
            file: Flaw(copy, other, files[file], what(found[copy]))
            for file, pair in pairs.items()
            for copy, other in (pair, pair[::-1])
            if copy in found
        }

    def laid_out(self, file: str, layout: Layout) -> None:
        """Note how a tree of this save is laid out."""
        self._new[file] = Known.of(file, layout.described, layout.files)


class Linked:
    """Sharing for best weights, which stay complete in their folder: shared files get names there, too.

    Args:
        sharing: what the checkpoints of the run share.
        folder: the folder of the weights.
    """

    def __init__(self, sharing: Sharing, folder: Path) -> None:
        self._sharing, self._folder = sharing, folder

    def share(
        self, file: str, arrays: Mapping[Content, tuple[str, HostArray]]
    ) -> tuple[dict[Content, Place], dict[str, Record]]:
        """Find places for arrays of a tree, as `Sharing.share` does."""
        return self._sharing.linked(file, arrays, self._folder)

    def laid_out(self, file: str, layout: Layout) -> None:
        """Do nothing: checkpoints share with each other."""


def lay_out(file: str, arrays: Mapping[str, HostArray], sharing: Sharing | Linked | None = None) -> Layout:
    """Decide where the arrays of a tree lie; what is to be shared is written into a shared file.

    Args:
        file: name of the tree's own file.
        sharing: None to share nothing with other checkpoints.
    """
    contents = {name: _content(arrays[name]) for name in ordered(arrays)}
    first: dict[Content, tuple[str, HostArray]] = {}
    for name, content in contents.items():
        if arrays[name].nbytes >= LEAST:
            first.setdefault(content, (name, arrays[name]))
    places, files = ({}, {}) if sharing is None else sharing.share(file, first)
    own = {content: Place(file, name) for content, (name, _) in first.items()}
    places = own | places
    here, described = {}, {}
    for name, content in contents.items():
        array, place = arrays[name], places.get(content, Place(file, name))
        described[name] = describe(array, array.shape, array.nbytes, xxh3_128=content[0])
        if place == (file, name):
            here[name] = array
        else:
            described[name]["pieces"] = [_whole(place, array.shape)]
    layout = Layout(here, described, files)
    if sharing is not None:
        sharing.laid_out(file, layout)
    return layout


def _content(array: HostArray) -> Content:
    return content_digest(array), array.dtype, array.shape


def _whole(place: Place, shape: tuple[int, ...]) -> dict[str, Json]:
    """Describe the piece that is a whole array."""
    return {"file": place.file, "key": place.key, "offset": [0] * len(shape), "shape": list(shape)}
