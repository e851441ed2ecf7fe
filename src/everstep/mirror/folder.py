"""A mirror in a folder, such as one of another disk: durable, whole files."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import xxhash

from everstep.durable import (
    create,
    discard,
    fsync_folder,
    make_dirs,
    rename,
    temporary,
    write,
    write_whole,
)
from everstep.hazard import reach
from everstep.mirror.place import blocks, digest_of, require_equal
from everstep.untrusted_files import read_regular

ROOM = "mirror"


class Folder:
    """Objects as files below `root`, which need not exist; see `Place`."""

    def __init__(self, root: Path) -> None:
        self.name, self._root = str(root), root

    def keys(self, folder: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for place, _, names in os.walk(self._root / folder):
            for name in names:
                path = Path(place, name)
                with contextlib.suppress(FileNotFoundError):  # another process deletes meanwhile
                    found[path.relative_to(self._root).as_posix()] = path.stat().st_size
        return found

    def read(self, key: str) -> bytes:
        return read_regular(self._root / key)

    def fetch(self, key: str, file: Path) -> None:
        shutil.copyfile(self._root / key, file)

    def put(self, key: str, source: Path, start: int, end: int) -> str:
        target, digest = self._root / key, xxhash.xxh3_128()
        make_dirs(target.parent, ROOM)
        new = temporary(target)
        discard(new, ROOM)
        try:
            with create(new, ROOM) as file:
                for block in blocks(source, start, end):
                    digest.update(block)
                    write(file, block, ROOM)
            rename(new, target, ROOM)
        finally:
            discard(new, ROOM)
        fsync_folder(target.parent, ROOM)
        reach("mirror.verify")
        require_equal(key, digest_of(target), digest.hexdigest())
        return digest.hexdigest()

    def create(self, key: str, data: bytes) -> None:
        target = self._root / key
        make_dirs(target.parent, ROOM)
        write_whole(target, data, ROOM, replace=False)

    def delete(self, key: str) -> None:
        path = self._root / key
        reach("mirror.unlink")
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # until a folder that is not empty
            for parent in path.relative_to(self._root).parents[:-1]:
                (self._root / parent).rmdir()
