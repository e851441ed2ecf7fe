"""Place that a mirror lies in: what a folder and a store have in common, and the folder."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

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
from everstep.errors import MirrorError
from everstep.hazard import reach
from everstep.untrusted_files import read_regular

ROOM = "mirror"

BLOCK = 4 << 20
"""Bytes that are read at once."""

PART_BYTES = 64 << 20
"""Most bytes of a part of a journal; a larger object is always a whole file."""


class Place(Protocol):
    """Objects by key, "/" between the parts of a key.  Any method may raise any exception of its library.

    Attributes:
        name: URL or path, without credentials.
    """

    name: str

    def keys(self, folder: str) -> dict[str, int]:
        """List all objects whose key begins with `folder` and "/": {key: size}."""
        ...

    def read(self, key: str) -> bytes:
        """Read a small object; FileNotFoundError if it is missing."""
        ...

    def fetch(self, key: str, file: Path) -> None:
        """Write an object's bytes to a new local file; FileNotFoundError if the object is missing."""
        ...

    def put(self, key: str, source: Path, start: int, end: int) -> str:
        """Store the bytes from `start` to `end` of a local file, and verify them in the store.

        An object of that key is replaced.

        Returns:
            xxh3_128 of the bytes.
        """
        ...

    def create(self, key: str, data: bytes) -> None:
        """Store a small object, if there is none of that key; read it to know whose it is."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object, if there is one."""
        ...


def blocks(source: Path, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Yield the bytes of a file from `start` to `end`, a block at a time.

    Raises:
        EOFError: the file ends before.
    """
    with source.open("rb") as file:
        file.seek(start)
        left = os.fstat(file.fileno()).st_size - start if end is None else end - start
        while left:
            block = file.read(min(BLOCK, left))
            if not block:
                raise EOFError(f"{source} ends {left:,} bytes before its expected end")
            left -= len(block)
            yield block


def digest_of(source: Path, start: int = 0, end: int | None = None) -> str:
    """Compute the xxh3_128 of a file's bytes from `start` to `end`."""
    digest = xxhash.xxh3_128()
    for block in blocks(source, start, end):
        digest.update(block)
    return digest.hexdigest()


def require_equal(key: str, stored: str, sent: str) -> None:
    """Refuse bytes that came back from a store as others.

    Raises:
        MirrorError: the two checksums differ.
    """
    if stored != sent:
        raise MirrorError(
            f"{key} came back from the mirror with checksum {stored}, and {sent} was sent: check the store"
        )


PLAIN_MD5 = re.compile(r"[0-9a-f]{32}")
"""Form of an MD5 as hexadecimal digits."""


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
