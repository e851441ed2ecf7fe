"""Content of arrays, recognised by its digest: what is equal is written once.

Within a checkpoint, an array that is equal to another one is not written.  Between checkpoints, an array that
is equal to one of the newest checkpoint is written into a file of its own, X.safetensors.  The next save
makes a second physical copy, X.copy.safetensors; from then on, each folder has names (hard links) of both, so
that each folder is complete in itself.  No save writes more bytes than one that shares nothing.  Either copy
alone is enough: no single fault takes more than one checkpoint.
"""

from __future__ import annotations

import errno
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from everstep.checkpoint import files
from everstep.checkpoint.array_file import (
    Record,
    check_size,
    copy_file,
    ordered,
    unreadable,
    verify_file,
    write_arrays,
)
from everstep.contracts.state import HostArray, Json
from everstep.durable import require_no_link, temporary
from everstep.errors import DamagedCheckpointError
from everstep.state import content_digest

T = TypeVar("T")

LEAST = 4096
"""Bytes from which on an array is compared with others: for less, a reference costs more than the content."""
LEAST_FILE = 1 << 16
"""Bytes from which on a shared file is worth its fsync."""
COPY = "copy"
"""Fact in the record of a shared file: name of its second copy in the same folder, which may be missing."""
_NO_LINKS = {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EACCES, errno.ENOENT}
"""Errors of file systems without hard links, of another one, of those that refuse one more; a lost file."""


class Flaw(NamedTuple):
    """A copy of a shared file that is damaged or missing, where the other copy is whole.

    Attributes:
        path, whole: the copy, and the other one.
        record: the file's size and checksum.
        how: what is wrong, as a sentence for the user.
    """

    path: Path
    whole: Path
    record: Record
    how: str


# ------------------------------------------------------------------------------------- reading


def copies_of(folder: Path, name: str, record: Record) -> list[Path]:
    """List the paths at which a file of a checkpoint may lie: one, or two of a shared file."""
    return [folder / name, *([folder / record[COPY]] if COPY in record else [])]


def either(folder: Path, name: str, record: Record, use: Callable[[Path], T], flaws: list[Flaw]) -> T:
    """Use a file of a checkpoint; of a shared file the second copy, where the first is damaged.

    Args:
        use: reads the file at a path.
        flaws: takes what is wrong with the first copy.
    """
    path, *second = copies_of(folder, name, record)
    try:
        return use(path)
    except DamagedCheckpointError as error:
        if not second:
            raise
        first = error
    try:
        found = use(second[0])
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(
            f"checkpoint {folder.name} is damaged: {_what(first)}, and {_what(error)}"
        ) from error
    flaws.append(Flaw(path, second[0], record, _what(first)))
    return found


def copy_here(folder: Path, name: str, record: Record, target: Path) -> Record:
    """Copy a file of a checkpoint durably, shared or not; returns the record of the copy."""
    either(folder, name, record, lambda path: _copy(path, target, record), [])
    return {key: value for key, value in record.items() if key != COPY}


def check_there(folder: Path, name: str, record: Record) -> None:
    """Require that a file of a checkpoint, or its copy, is there and has its size."""

    def look(path: Path) -> None:
        try:
            found = path.stat().st_size
        except OSError as error:
            unreadable(path, error)
        check_size(path, found, record)

    either(folder, name, record, look, [])


def verify_copies(folder: Path, name: str, record: Record) -> list[Flaw]:
    """Verify all bytes of a file of a checkpoint, and of its copy; returns what is wrong with one of them."""
    flaws: list[Flaw] = []
    either(folder, name, record, lambda path: verify_file(path, record), flaws)
    path, *second = copies_of(folder, name, record)
    if second and not flaws and second[0].exists():
        try:
            verify_file(second[0], record)
        except DamagedCheckpointError as error:
            flaws.append(Flaw(second[0], path, record, _what(error)))
    return flaws


def _copy(path: Path, target: Path, record: Record) -> None:
    try:
        copy_file(path, target, record)
    except DamagedCheckpointError:
        files.discard(target)
        raise


def heal(flaw: Flaw) -> str:
    """Make a damaged copy again from the other one, durably; returns a sentence for the user."""
    target, new = flaw.path, temporary(flaw.path)
    try:
        require_no_link(target, target.parent.parent)
        files.discard(new)
        _copy(flaw.whole, new, flaw.record)
        if target.is_dir():
            files.discard(target)  # a rename cannot replace a folder
        files.rename(new, target)
        files.fsync_folder(target.parent)
    except (OSError, DamagedCheckpointError) as error:
        files.discard(new)
        return f"{flaw.how}; {flaw.whole.name} was used, and could not be copied ({error})"
    return f"{flaw.how}; it was made again from {flaw.whole.name}, which is whole"


def _what(error: DamagedCheckpointError) -> str:
    return str(error).partition(" is damaged: ")[2]


# ------------------------------------------------------------------------------------- writing

Content: TypeAlias = tuple[str, str, tuple[int, ...]]
"""What makes two arrays equal: the digest of their bytes, the element type, and the shape."""


class Place(NamedTuple):
    """Place of an array's bytes: the array `key` of `file`."""

    file: str
    key: str


class Known(NamedTuple):
    """Arrays of one tree of a checkpoint, as far as they can be shared.

    Attributes:
        folder: the checkpoint.
        places: the place of each content.
        files: the record of each shared file.
    """

    folder: Path
    places: dict[Content, Place]
    files: dict[str, Record]

    @classmethod
    def of(cls, folder: Path, file: str, described: Mapping[str, Any], files: Mapping[str, Record]) -> Known:
        """Take what can be shared from the descriptions of a tree whose own file is `file`."""
        places = {}
        for name, facts in described.items():
            for piece in pieces_of(name, facts, file):
                if facts["bytes"] >= LEAST:
                    content = piece["xxh3_128"], facts["dtype"], tuple(piece["shape"])
                    places[content] = Place(piece["file"], piece["key"])
        return cls(folder, places, {name: record for name, record in files.items() if COPY in record})


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

    Args:
        before: returns, by a tree's own file, what the newest checkpoint has; asked once for each tree, and
            again where that checkpoint is gone.
    """

    def __init__(self, before: Callable[[str], Known | None]) -> None:
        self._before = before
        self._known: dict[str, Known | None] = {}
        self._new: dict[str, Known] = {}
        self._target: Path | None = None

    @contextmanager
    def save(self, target: Path) -> Iterator[None]:
        """Save a checkpoint in the block, whose folder will be `target`; `committed` ends a good one."""
        self._target, self._new = target, {}
        try:
            yield
        finally:
            self._target = None

    def committed(self) -> None:
        """Note that what was written is a checkpoint now."""
        self._known |= self._new

    def share(
        self, folder: Path, file: str, arrays: Mapping[Content, tuple[str, HostArray]]
    ) -> tuple[dict[Content, Place], dict[str, Record]]:
        """Find or make places in shared files for arrays of a tree; the other arrays are new.

        Outside `save` (for best weights) none are made.

        Args:
            folder: the folder that is written.
            file: the tree's own file.
            arrays: name and array by content, from `LEAST` bytes on.

        Returns:
            Places, and the records of the files that they are in.
        """
        known = self._known_of(file)
        if known is None:
            return {}, {}
        places, found = _linked(known, folder, arrays)
        again = {
            name: array
            for content, (name, array) in arrays.items()
            if content in known.places and known.places[content].file not in known.files
        }
        if self._target is not None and sum(array.nbytes for array in again.values()) >= LEAST_FILE:
            # a name that was never used: later folders have several of such files
            stem = f"{self._target.name}-{secrets.token_hex(4)}"
            new = f"{stem}.safetensors"
            found[new] = {**write_arrays(folder / new, again), COPY: f"{stem}.copy.safetensors"}
            places |= {c: Place(new, name) for c, (name, _) in arrays.items() if name in again}
        return places, found

    def _known_of(self, file: str) -> Known | None:
        known = self._known.get(file)
        if file not in self._known or (known is not None and not known.folder.exists()):
            known = self._known[file] = self._before(file)
        return known

    def laid_out(self, file: str, layout: Layout) -> None:
        """Note how a tree of this save is laid out."""
        if self._target is not None:
            self._new[file] = Known.of(self._target, file, layout.described, layout.files)


def _linked(
    known: Known, folder: Path, arrays: Mapping[Content, tuple[str, HostArray]]
) -> tuple[dict[Content, Place], dict[str, Record]]:
    """Give shared files of the save before names in a folder, too; returns the places that they have.

    A file that is hardly used any more, or that cannot be linked, gives none: its content is new.
    """
    places = {c: place for c in arrays if (place := known.places.get(c)) and place.file in known.files}
    used: dict[str, int] = defaultdict(int)
    for content, place in places.items():
        used[place.file] += arrays[content][1].nbytes
    found = {
        file: known.files[file]
        for file, count in used.items()
        if 2 * count >= known.files[file]["bytes"] and _link(known.folder, folder, file, known.files[file])
    }
    return {content: place for content, place in places.items() if place.file in found}, found


def _link(source: Path, folder: Path, name: str, record: Record) -> bool:
    """Give both copies of a shared file a name in a folder, and make the copy that is lacking.

    The names are as durable as the folder: the caller syncs it.

    Returns:
        False, with nothing in the folder, where no copy is whole or the file system has no links.
    """
    pairs = list(zip(copies_of(source, name, record), copies_of(folder, name, record), strict=True))
    whole = [path for path, _ in pairs if _has_size(path, record)]
    made = []
    try:
        for path, target in pairs if whole else ():
            with suppress(FileExistsError):  # another tree of this save, perhaps another rank's, has it too
                if path in whole:
                    files.link(path, target)
                else:
                    _copy(whole[0], target, record)
                made.append(target)
    except (OSError, DamagedCheckpointError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_LINKS:
            raise
        for target in made:
            files.discard(target)
        return False
    return bool(whole)


def _has_size(path: Path, record: Record) -> bool:
    try:
        return path.is_file() and path.stat().st_size == record["bytes"]
    except OSError:
        return False


def lay_out(
    folder: Path, file: str, arrays: Mapping[str, HostArray], sharing: Sharing | None = None
) -> Layout:
    """Decide where the arrays of a tree lie; what is to be shared is written into shared files.

    Args:
        folder: the folder that is written.
        file: name of the tree's own file.
        sharing: None to share nothing with other checkpoints.
    """
    contents = {
        name: (content_digest(arrays[name]), arrays[name].dtype, arrays[name].shape)
        for name in ordered(arrays)
    }
    first: dict[Content, tuple[str, HostArray]] = {}
    for name, content in contents.items():
        if arrays[name].nbytes >= LEAST:
            first.setdefault(content, (name, arrays[name]))
    places, found = sharing.share(folder, file, first) if sharing is not None and first else ({}, {})
    places = {content: Place(file, name) for content, (name, _) in first.items()} | places
    here, described = {}, {}
    for name, content in contents.items():
        array, place = arrays[name], places.get(content, Place(file, name))
        described[name] = describe(array, array.shape, array.nbytes, xxh3_128=content[0])
        if place == (file, name):
            here[name] = array
        else:
            whole: dict[str, Json] = {"offset": [0] * len(array.shape), "shape": list(array.shape)}
            described[name]["pieces"] = [{"file": place.file, "key": place.key, **whole}]
    layout = Layout(here, described, found)
    if sharing is not None:
        sharing.laid_out(file, layout)
    return layout


# ------------------------------------------------------------------------------- descriptions of arrays

Piece: TypeAlias = Mapping[str, Any]
"""{"file", "key", "offset", "shape", "xxh3_128"}, see `format`."""


def describe(array: HostArray, shape: Sequence[int], size: int, **more: Json) -> dict[str, Json]:
    """Describe an array.

    Args:
        array: the array, or a box of it.
        shape, size: shape and number of bytes of the whole array.
        more: "xxh3_128", "pieces" or both.
    """
    return {
        "dtype": array.dtype,
        "shape": list(shape),
        "backend": array.backend,
        "extra": array.extra,
        "bytes": size,
        **more,
    }


def pieces_of(name: str, facts: Mapping[str, Any], file: str) -> list[Piece]:
    """List the pieces of a described array, each with its checksum.

    Args:
        file: the own file of the array's tree.  An array that lies whole in it is one piece.
    """
    shape = facts["shape"]
    whole = {"file": file, "key": name, "offset": [0] * len(shape), "shape": shape}
    pieces: list[Piece] = facts.get("pieces", [whole])
    return [{"xxh3_128": facts.get("xxh3_128"), **pieces[0]}] if len(pieces) == 1 else pieces
