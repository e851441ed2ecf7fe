"""A mirror in a store that fsspec reaches: S3, GCS and others."""

from __future__ import annotations

import base64
import contextlib
import hashlib
from pathlib import Path
from typing import Any

import fsspec
import xxhash

from everstep.hazard import reach
from everstep.mirror.place import PART_BYTES, PLAIN_MD5, blocks, digest_of, require_equal

_PART = 50 << 20
"""Bytes of a part of a large upload to S3, as s3fs chooses them."""
_NO_FOLDERS = {"s3", "s3a", "gs", "gcs", "abfs", "az", "adl", "memory"}
"""Schemes whose stores have keys and no folders."""


class ObjectStore:
    """Objects below a URL; see `Place`.

    Args:
        url: with its credentials.
        name: the URL without them.

    Raises:
        ImportError: a package is missing.
        ValueError: fsspec does not know the scheme.
    """

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        self._fs: Any
        # a connection of its own: listings that other parts of the program keep are not used
        self._fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
        self._root = root.rstrip("/")
        self._folders = url.partition("://")[0] not in _NO_FOLDERS

    def keys(self, folder: str) -> dict[str, int]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(f"{self._root}/{folder}", detail=True)
        except FileNotFoundError:
            return {}
        at = len(self._root) + 1
        return {path[at:]: int(info["size"]) for path, info in found.items()}

    def read(self, key: str) -> bytes:
        return bytes(self._fs.cat_file(self._path(key)))

    def fetch(self, key: str, file: Path) -> None:
        self._fs.get_file(self._path(key), str(file))

    def put(self, key: str, source: Path, start: int, end: int) -> str:
        path = self._new(key)
        if end - start > PART_BYTES:  # a checkpoint's file, whole
            self._fs.put_file(str(source), path)
        else:  # a journal may grow meanwhile
            self._fs.pipe_file(path, b"".join(blocks(source, start, end)))
        reach("mirror.verify")
        digest = digest_of(source, start, end)
        if not self._says_equal(path, source, start, end):
            require_equal(key, self._digest(path), digest)
        return digest

    def create(self, key: str, data: bytes) -> None:
        path = self._new(key)
        try:
            # where the store has a conditional put, nobody else's object is replaced
            self._fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            return
        except (NotImplementedError, TypeError, ValueError):
            # one of these where fsspec's class for a store has no such mode
            # here two processes may both find nothing, and the later one replaces the earlier one's object
            if not self._fs.exists(path):
                self._fs.pipe_file(path, data)

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(key))

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _new(self, key: str) -> str:
        path = self._path(key)
        if self._folders:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        return path

    def _says_equal(self, path: str, source: Path, start: int, end: int) -> bool:
        """Whether the store itself says that it has these bytes; False also where it says nothing of use."""
        self._fs.invalidate_cache()
        info = self._fs.info(path)
        tag = str(info.get("ETag", "")).strip('"')
        if "md5Hash" in info:
            tag = base64.b64decode(info["md5Hash"]).hex()
        whole = hashlib.md5(usedforsecurity=False)
        if PLAIN_MD5.fullmatch(tag):
            for block in blocks(source, start, end):
                whole.update(block)
            return info["size"] == end - start and whole.hexdigest() == tag
        count = 0
        for at in range(start, end, _PART):
            part = hashlib.md5(usedforsecurity=False)
            for block in blocks(source, at, min(at + _PART, end)):
                part.update(block)
            whole.update(part.digest())
            count += 1
        return info["size"] == end - start and tag == f"{whole.hexdigest()}-{count}"

    def _digest(self, path: str) -> str:
        digest = xxhash.xxh3_128()
        with self._fs.open(path, "rb") as file:
            while block := file.read(_PART):
                digest.update(block)
        return digest.hexdigest()
