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
from everstep.checkpoint.manifest import describe, pieces_of
from everstep.checkpoint.shared import FOLDER, HERE, have_two, is_shared, link_here, make_folder, write_shared
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

    Attributes:
        unfinished: whether a save has begun and not ended.
    """

    def __init__(self, run_dir: Path, before: Callable[[str], Known | None]) -> None:
        self._folder, self._before = run_dir / FOLDER, before
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
        places, files = self._in_use(known, arrays)
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
        places, found = self._in_use(self._known_of(file, arrays), arrays)
        linked = {name: record for name, record in found.items() if link_here(self._folder / name, folder)}
        files = {name: {**record, FOLDER: HERE} for name, record in linked.items()}
        return {content: place for content, place in places.items() if place.file in files}, files

    def _in_use(
        self, known: Known, arrays: Mapping[Content, tuple[str, HostArray]]
    ) -> tuple[dict[Content, Place], dict[str, Record]]:
        """Find the places in shared files of the save before.

        A file that is hardly used any more, or of which no copy is there, gives none: its content is new.
        """
        places = {c: place for c in arrays if (place := known.places.get(c)) and place.file in known.files}
        used: dict[str, int] = defaultdict(int)
        for content, place in places.items():
            used[place.file] += arrays[content][1].nbytes
        files = {
            file: known.files[file]
            for file, count in used.items()
            if 2 * count >= known.files[file]["bytes"] and have_two(self._folder / file, known.files[file])
        }
        return {content: place for content, place in places.items() if place.file in files}, files

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
