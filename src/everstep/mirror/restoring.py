"""Comparison of a run directory with its mirror, and what is brought back from there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from everstep.checkpoint import CheckpointName, Store, place_apart, read_manifest
from everstep.checkpoint import files as durable_files
from everstep.durable import (
    create,
    discard,
    discard_leftovers,
    require_no_link,
    temporary,
    write,
    write_whole,
)
from everstep.errors import CheckpointError, MirrorError
from everstep.hazard import reach
from everstep.mirror.mirror import Contents, Part
from everstep.mirror.place import ROOM, Place, blocks, digest_of, whole

_CHOICE = (
    "to continue from the mirror, give an empty run directory; to continue from this directory, give another "
    "mirror; neither loses anything"
)


class Restoring:
    """Brings a run directory up to the state of its mirror, if the mirror is ahead.

    Journals tell which one is ahead: each start writes a segment of its own, and only ever longer.  They are
    brought last, so after a kill the mirror is still ahead, and the next start brings the rest.  The lock of
    the run directory is held.
    """

    def __init__(self, place: Place, contents: Contents, run_dir: Path) -> None:
        self._place, self._contents, self._top = place, contents, run_dir
        self._journals = [path for path in sorted(contents.files) if path.startswith("journal/")]
        names = {path.split("/")[1] for path in contents.files if path.startswith("checkpoints/")}
        self._checkpoints = {CheckpointName.parse(name) for name in names if CheckpointName.matches(name)}

    def is_ahead(self) -> bool:
        """Whether the mirror has a part of the journal that the directory lacks."""
        for path in self._journals:
            self._require_same_history(path)
        return any(self._size(path) < self._contents.size(path) for path in self._journals)

    def _size(self, path: str) -> int:
        try:
            return (self._top / path).stat().st_size
        except FileNotFoundError:
            return 0

    def _require_same_history(self, path: str) -> None:
        at, size = 0, self._size(path)
        for part in self._contents.files[path]:
            end = min(at + part.bytes, size)
            if at < end and digest_of(self._top / path, at, end) != self._digest(part, end - at):
                raise MirrorError(
                    f"{self._top} and its mirror {self._place.name} were trained apart: {path} differs from "
                    f"byte {at:,} on; {_CHOICE}"
                )
            at += part.bytes

    def _digest(self, part: Part, size: int) -> str:
        """Digest of the first bytes of a part; of all, as the list says."""
        if size == part.bytes:
            return part.digest
        with TemporaryDirectory(prefix="everstep-mirror-") as folder:
            return digest_of(self._fetch_part(part, Path(folder, "part")), 0, size)

    def _fetch_part(self, part: Part, file: Path) -> Path:
        self._place.fetch(part.key, file)
        if file.stat().st_size != part.bytes or digest_of(file) != part.digest:
            raise MirrorError(
                f"{part.key} in the mirror {self._place.name} is damaged: it is not the {part.bytes:,} bytes "
                "that were uploaded; restore it from a copy, or give another mirror"
            )
        return file

    def require_nothing_lost(self) -> None:
        """Refuse to bring anything over a directory with a checkpoint that the mirror has never had."""
        store = Store(self._top)
        for facts in store.facts():
            if not self._is_known(store.path(facts.name)):
                raise MirrorError(
                    f"{self._top} and its mirror {self._place.name} were trained apart: only the directory "
                    f"has {facts.name}, and the mirror went on without it, up to "
                    f"{max(self._checkpoints, default='no checkpoint')}; {_CHOICE}"
                )

    def _is_known(self, folder: Path) -> bool:
        """Whether a checkpoint is in the mirror, or was there: then the mirror has the rows up to it."""
        if self._is_there(folder):
            return True
        meta = read_manifest(folder)["meta"]
        position = meta.get("journal") if isinstance(meta, dict) else None
        if position is None:
            return False
        return int(position[1]) <= self._contents.size(f"journal/segment-{position[0]:04d}.evj")

    def _is_there(self, folder: Path) -> bool:
        path = (folder / "manifest.json").relative_to(self._top).as_posix()
        held = self._contents.files.get(path)
        return held is not None and held[0].digest == digest_of(folder / "manifest.json")

    def bring(self, say: Callable[[str], None]) -> None:
        """Bring everything that the directory lacks; what only the directory has moves to superseded/.

        A FileNotFoundError says that a file is gone from the mirror: its list is not the newest any more.
        """
        discard_leftovers(self._top / "journal", ROOM)  # of an earlier start that was killed here
        folders: dict[str, list[str]] = {}
        for path in self._contents.files.keys() - set(self._journals):
            folders.setdefault(path.rpartition("/")[0], []).append(path)
        brought = [folder for folder, paths in sorted(folders.items()) if self._bring_folder(folder, paths)]
        for folder in (self._top / "checkpoints").glob("*"):  # the mirror's newest is the newest
            if CheckpointName.matches(folder.name) and f"checkpoints/{folder.name}" not in folders:
                self._set_aside(folder)
        for name, note in self._contents.notes.items():
            write_whole(self._top / name, note.encode("latin-1"), ROOM)
        for path in self._journals:
            if self._size(path) < self._contents.size(path):
                require_no_link(self._top / path, self._top)
                with whole(self._top / path) as new:
                    self._fetch(path, new)
        count = sum(folder.startswith("checkpoints/") for folder in brought)
        say(
            f"the run comes from its mirror {self._place.name}, which is ahead of {self._top}: "
            f"{count} checkpoint{'s' * (count != 1)} brought, the newest is "
            f"{max(self._checkpoints, default='no checkpoint')}"
        )

    def _bring_folder(self, folder: str, paths: list[str]) -> bool:
        """Bring a checkpoint whole, unless it is there; returns whether it was brought."""
        target = self._top / folder
        with contextlib.suppress(CheckpointError):
            read_manifest(target)
            if self._is_there(target):
                return False
        self._set_aside(target)

        def write(new: Path) -> int:
            return sum(self._fetch(path, new / path.rpartition("/")[2]) for path in sorted(paths))

        place_apart(target, write, top=self._top)
        return True

    def _set_aside(self, path: Path) -> None:
        if path.exists():
            name = f"{path.name}.before-the-mirror"
            durable_files.move(path, self._top / "superseded", name, top=self._top)

    def _fetch(self, path: str, file: Path) -> int:
        """Write a file of the run from its parts, each verified, and make it durable; returns its size."""
        piece = temporary(file.with_name(f"{file.name}.part"))
        try:
            with create(file, ROOM) as target:
                for part in self._contents.files[path]:
                    reach("mirror.fetch")
                    for block in blocks(self._fetch_part(part, piece)):
                        write(target, block, ROOM)
        finally:
            discard(piece, ROOM)
        return self._contents.size(path)
