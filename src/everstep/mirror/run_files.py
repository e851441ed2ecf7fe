"""Files of a run directory that belong to what is committed: what a mirror holds."""

from __future__ import annotations

from pathlib import Path

import xxhash

from everstep.checkpoint import Store, read_manifest
from everstep.checkpoint.shared import copy_of, is_shared, located
from everstep.errors import CheckpointError
from everstep.mirror.contents import NOTES
from everstep.mirror.mirror import Committed, Source
from everstep.record import segment_number
from everstep.untrusted_files import LARGEST_NOTE, read_regular


class RunFiles:
    """List of the committed files; manifests are read once.

    Args:
        store: the checkpoints of the run; its writer thread, or nobody, changes them meanwhile.
        segment: number of this start.
    """

    def __init__(self, store: Store, segment: int) -> None:
        self._store, self._segment = store, segment
        self._known: dict[tuple[Path, int], dict[str, Source]] = {}

    def now(self, durable: int, *, ended: bool = False) -> Committed:
        """List the files.

        Args:
            durable: number of bytes of this start's journal that are on the disk.
            ended: whether the start ends now.

        Raises:
            OSError: a file cannot be read.
        """
        store, top = self._store, self._store.run_dir
        found: dict[str, Source] = {}
        wholes = []
        folders = [*store.best_folders(), *(store.path(facts.name) for facts in store.facts())]
        known = self._known
        self._known = {}
        for folder in folders:
            key = folder, (folder / "manifest.json").stat().st_mtime_ns
            self._known[key] = known.get(key) or _listed(folder, top)
            found |= self._known[key]
            wholes.append(frozenset(self._known[key]))
        for path in sorted((top / "journal").glob("segment-*.evj")):
            number = segment_number(path)
            if number is not None and number <= self._segment:
                size = durable if number == self._segment else path.stat().st_size
                if size:
                    found[f"journal/{path.name}"] = Source(path, size, None)
        notes = {name: note for name in NOTES if (note := _note(top / name)) is not None}
        return Committed(found, notes, ended, wholes)


def _listed(folder: Path, top: Path) -> dict[str, Source]:
    """List the files of a checkpoint, as its manifest does; none if that is damaged."""
    manifest = folder / "manifest.json"
    try:
        files = read_manifest(folder)["files"]
    except CheckpointError:
        return {}
    found = {}
    for name, record in files.items():
        path = located(folder, name, record)
        copy = copy_of(path) if is_shared(record) else None
        found[path.relative_to(top).as_posix()] = Source(path, record["bytes"], record["xxh3_128"], copy)
    data = read_regular(manifest)
    return found | {
        manifest.relative_to(top).as_posix(): Source(manifest, len(data), xxhash.xxh3_128_hexdigest(data))
    }


def _note(path: Path) -> str | None:
    """Read a small file, which may change while an upload runs."""
    try:
        return read_regular(path, LARGEST_NOTE).decode("latin-1")
    except FileNotFoundError:
        return None
