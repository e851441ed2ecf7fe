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
from everstep.mirror.contents import Contents, Part
from everstep.mirror.place import ROOM, Place, blocks, digest_of, whole

_JOURNAL = "journal/"


class Restoring:
    """Brings a run directory up to the state of its mirror, if the mirror is ahead.

    Journals tell which one is ahead: each start writes a segment of its own, and only ever longer.  They are
    brought last, so after a kill the mirror is still ahead, and the next start brings the rest.

    Args:
        place, contents: the mirror, and its newest list.
        run_dir: the run directory, whose lock is held.
    """

    def __init__(self, place: Place, contents: Contents, run_dir: Path) -> None:
        self._place, self._contents, self._top = place, contents, run_dir

    def is_ahead(self) -> bool:
        """Whether the mirror has a part of the journal that the directory lacks."""
        ahead = False
        for path, parts in self._contents.files.items():
            if path.startswith(_JOURNAL):
                size = self._size(path)
                self._require_same_history(path, parts, size)
                ahead |= size < self._contents.size(path)
        return ahead

    def _size(self, path: str) -> int:
        try:
            return (self._top / path).stat().st_size
        except FileNotFoundError:
            return 0

    def _require_same_history(self, path: str, parts: tuple[Part, ...], size: int) -> None:
        at = 0
        for part in parts:
            end = min(at + part.bytes, size)
            if at < end and digest_of(self._top / path, at, end) != self._digest(part, end - at):
                raise MirrorError(
                    f"{self._top} and its mirror {self._place.name} were trained apart: {path} differs from "
                    f"byte {at:,} on; {self._choice()}"
                )
            at += part.bytes

    def _digest(self, part: Part, size: int) -> str:
        """Digest of the first bytes of a part; of all, as the list says."""
        if size == part.bytes:
            return part.digest
        with TemporaryDirectory(prefix="everstep-mirror-") as folder:
            piece = Path(folder, "part")
            self._place.fetch(part.key, piece)
            _require_whole(self._place, part, piece)
            return digest_of(piece, 0, size)

    def _choice(self) -> str:
        return (
            "to continue from the mirror, give an empty run directory; to continue from this directory, give "
            "another mirror; neither loses anything"
        )

    def require_nothing_lost(self) -> None:
        """Refuse to bring anything over a directory with a checkpoint that the mirror has never had."""
        store = Store(self._top)
        for facts in store.facts():
            folder = store.path(facts.name)
            if not self._is_known(folder):
                newest = max(self._checkpoints(), default=None)
                raise MirrorError(
                    f"{self._top} and its mirror {self._place.name} were trained apart: only the directory "
                    f"has {facts.name}, and the mirror went on without it, up to "
                    f"{newest or 'no checkpoint'}; {self._choice()}"
                )

    def _is_known(self, folder: Path) -> bool:
        """Whether a checkpoint is in the mirror, or was there: then the mirror has the rows up to it."""
        path = (folder / "manifest.json").relative_to(self._top).as_posix()
        held = self._contents.files.get(path)
        if held is not None and held[0].digest == digest_of(folder / "manifest.json"):
            return True
        meta = read_manifest(folder)["meta"]
        position = meta.get("journal") if isinstance(meta, dict) else None
        if position is None:
            return False
        return int(position[1]) <= self._contents.size(f"journal/segment-{position[0]:04d}.evj")

    def _checkpoints(self) -> list[CheckpointName]:
        names = {path.split("/")[1] for path in self._contents.files if path.startswith("checkpoints/")}
        return [CheckpointName.parse(name) for name in names if CheckpointName.matches(name)]

    # --------------------------------------------------------------------------------- bringing

    def bring(self, say: Callable[[str], None]) -> None:
        """Bring everything that the directory lacks; what only the directory has moves to superseded/.

        Raises:
            FileNotFoundError: a file is gone from the mirror: its list is not the newest any more.
            MirrorError: a file in the mirror is damaged.
        """
        discard_leftovers(self._top / "journal", ROOM)  # of an earlier start that was killed here
        folders: dict[str, list[str]] = {}
        for path in self._contents.files:
            if path.startswith(("checkpoints/", "best/")):
                folders.setdefault(path.rpartition("/")[0], []).append(path)
        brought = [folder for folder, paths in sorted(folders.items()) if self._bring_folder(folder, paths)]
        self._leave_others(folders)
        for name, note in self._contents.notes.items():
            write_whole(self._top / name, note.encode("latin-1"), ROOM)
        for path in sorted(self._contents.files):
            if path.startswith(_JOURNAL) and self._size(path) < self._contents.size(path):
                self._bring_file(path)
        count = sum(folder.startswith("checkpoints/") for folder in brought)
        newest = max(self._checkpoints(), default="no checkpoint")
        say(
            f"the run comes from its mirror {self._place.name}, which is ahead of {self._top}: "
            f"{count} checkpoint{'' if count == 1 else 's'} brought, the newest is {newest}"
        )

    def _bring_folder(self, folder: str, paths: list[str]) -> bool:
        """Bring a checkpoint whole, unless it is there; returns whether it was brought."""
        target = self._top / folder
        manifest = f"{folder}/manifest.json"
        with contextlib.suppress(CheckpointError):
            read_manifest(target)
            if digest_of(target / "manifest.json") == self._contents.files[manifest][0].digest:
                return False
        self._set_aside(target)

        def write(new: Path) -> int:
            return sum(self._fetch(path, new / path.rpartition("/")[2]) for path in paths)

        place_apart(target, write, top=self._top)
        return True

    def _leave_others(self, folders: dict[str, list[str]]) -> None:
        """Move checkpoints that the mirror does not list away: the mirror's newest is the newest."""
        for path in (self._top / "checkpoints").glob("*"):
            if CheckpointName.matches(path.name) and f"checkpoints/{path.name}" not in folders:
                self._set_aside(path)

    def _set_aside(self, path: Path) -> None:
        if path.exists():
            name = f"{path.name}.before-the-mirror"
            durable_files.move(path, self._top / "superseded", name, top=self._top)

    def _bring_file(self, path: str) -> None:
        target = self._top / path
        require_no_link(target, self._top)
        with whole(target) as new:
            self._fetch(path, new)

    def _fetch(self, path: str, file: Path) -> int:
        """Write a file of the run from its parts, each verified, and make it durable; returns its size."""
        piece = temporary(file.with_name(f"{file.name}.part"))
        parts = self._contents.files[path]
        try:
            with create(file, ROOM) as target:
                for part in parts:
                    reach("mirror.fetch")
                    self._place.fetch(part.key, piece)
                    _require_whole(self._place, part, piece)
                    for block in blocks(piece):
                        write(target, block, ROOM)
        finally:
            discard(piece, ROOM)
        return self._contents.size(path)


def _require_whole(place: Place, part: Part, piece: Path) -> None:
    if piece.stat().st_size != part.bytes or digest_of(piece) != part.digest:
        raise MirrorError(
            f"{part.key} in the mirror {place.name} is damaged: its {piece.stat().st_size:,} bytes are not "
            f"the {part.bytes:,} that were uploaded; restore it from a copy, or give another mirror"
        )
