"""A file system that loses its power: what is on the disk for certain, by the calls of fsync so far.

Certain are the bytes of a file at its last fsync, and the names in a folder at the folder's last fsync.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from everstep import hazard


class Disk:
    """Follows what is durable below `top`, from now on; `at_each` is called at each operation."""

    def __init__(self, top: Path, keep: Path) -> None:
        self.top, self._keep = top, keep
        keep.mkdir()
        self._names: dict[int, dict[str, tuple[int, bool]]] = {}
        """By folder: name to number of the file or folder, and whether it is a folder."""
        self._files: dict[int, Path] = {}
        for path in (top, *top.rglob("*")):
            self._sync(path)

    def _sync(self, path: Path) -> None:
        number = path.stat().st_ino
        if path.is_dir():
            self._names[number] = {one.name: (one.stat().st_ino, one.is_dir()) for one in path.iterdir()}
            return
        # a link keeps the number from being used again
        if number not in self._files:
            os.link(path, self._keep / f"{number}.link")
        self._files[number] = self._keep / f"{number}"
        shutil.copyfile(path, self._files[number])

    @contextmanager
    def followed(self, at_each: Callable[[str], None]) -> Iterator[None]:
        """Follow each fsync inside the block."""
        real = os.fsync

        def fsync(descriptor: int) -> None:
            real(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.is_relative_to(self.top) and path.exists():
                self._sync(path)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            patch.setattr(hazard, "_action", at_each)
            yield

    def least(self, target: Path) -> None:
        """Make the tree of which everything is there that is certain, and nothing else."""
        self._build(self.top.stat().st_ino, target)

    def _build(self, number: int, target: Path) -> None:
        target.mkdir()
        for name, (inside, folder) in self._names.get(number, {}).items():
            if folder:
                self._build(inside, target / name)
            else:
                self._fill(inside, target / name)

    def _fill(self, number: int, path: Path) -> None:
        if number in self._files:
            shutil.copyfile(self._files[number], path)
        else:
            path.touch()

    def names_first(self, target: Path) -> None:
        """Make the tree whose names are those of now, with the bytes that are certain."""
        target.mkdir()
        for path in sorted(self.top.rglob("*")):
            new = target / path.relative_to(self.top)
            if path.is_dir():
                new.mkdir()
            else:
                self._fill(path.stat().st_ino, new)
