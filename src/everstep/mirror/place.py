"""Where a mirror lies: its address, and objects by key in a folder or in a store that fsspec reaches."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

import xxhash

from everstep.durable import create, make_dirs, placed, write, write_whole
from everstep.errors import ConfigError, MirrorError, to_install
from everstep.hazard import reach
from everstep.record import located, user_path
from everstep.redaction import HIDDEN, redacted
from everstep.untrusted_files import read_regular

ROOM = "mirror"

PART_BYTES = 64 << 20
"""Most bytes of a part of a journal; a larger object is always a whole file."""

_BLOCK = 4 << 20
_UPLOADED_PART = 50 << 20
"""Bytes of a part of a large upload to S3, as s3fs chooses them."""
_NO_FOLDERS = {"s3", "s3a", "gs", "gcs", "abfs", "az", "adl", "memory"}
"""Schemes whose stores have keys and no folders."""


class MirrorAt:
    """Address of a mirror, as a user gave it; `repr` and `str` have no credentials."""

    def __init__(self, url: str | os.PathLike[str]) -> None:
        if isinstance(url, str) and HIDDEN in url:
            raise ConfigError(f"mirror={url!r} comes from a record, without its credentials: give it again")
        scheme, is_url, rest = str(url).partition("://")
        self.url = str(url)
        self.folder: Path | None = None
        if not is_url or scheme == "file":
            # a drill's starts, each with a root of its own, must not meet in one mirror
            self.folder = located(user_path(rest if is_url else url, "mirror").absolute())

    def __str__(self) -> str:
        return str(redacted(self.url))

    __repr__ = __str__

    def describe(self, error: BaseException) -> str:
        """Describe an error of the place, without credentials."""
        text = f"{type(error).__name__}: {error}".replace(self.url, str(self))
        password = urlsplit(self.url).password if "@" in self.url else None
        for secret in {password, unquote(password)} if password else ():
            text = text.replace(secret, HIDDEN)
        return str(redacted(text))

    def open(self) -> Place:
        """Connect to the place; what is written there comes later."""
        if self.folder is not None:
            return Folder(self.folder)
        try:
            return ObjectStore(self.url, str(self))
        except ImportError as error:
            more = " gcsfs" if self.url.startswith(("gs:", "gcs:")) else ""
            raise ConfigError(f"mirror={self}: {error}: {to_install('mirror')}{more}") from error
        except Exception as error:  # of any library
            kind = ConfigError if isinstance(error, ValueError) else MirrorError
            raise kind(
                f"mirror={self} cannot be used ({self.describe(error)}); give a folder, s3://BUCKET/PATH or "
                "gs://BUCKET/PATH, and check the credentials and the network"
            ) from None


def blocks(source: Path, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Yield the bytes of a file from `start` to `end`, a block at a time."""
    with source.open("rb") as file:
        file.seek(start)
        remaining = os.fstat(file.fileno()).st_size - start if end is None else end - start
        while remaining:
            block = file.read(min(_BLOCK, remaining))
            if not block:
                raise EOFError(f"{source} ends {remaining:,} bytes before its expected end")
            remaining -= len(block)
            yield block


def digest_of(source: Path, start: int = 0, end: int | None = None) -> str:
    """Compute the xxh3_128 of a file's bytes from `start` to `end`."""
    return _hex(xxhash.xxh3_128(), blocks(source, start, end))


def _md5(data: Iterable[bytes]) -> str:
    return _hex(hashlib.md5(usedforsecurity=False), data)


def _hex(digest: Any, data: Iterable[bytes]) -> str:
    for block in data:
        digest.update(block)
    return str(digest.hexdigest())


def _require_equal(key: str, stored: str, sent: str) -> None:
    if stored != sent:
        raise MirrorError(
            f"{key} came back from the mirror with checksum {stored}, and {sent} was sent: check the store"
        )


class Folder:
    """Objects by key as files below `root`, which need not exist; "/" stands between the parts of a key."""

    def __init__(self, root: Path) -> None:
        self.name, self._root = str(root), root

    def keys(self, folder: str) -> dict[str, int]:
        """List all objects whose key begins with `folder` and "/": {key: size}."""
        sizes: dict[str, int] = {}
        for place, _, names in os.walk(self._root / folder):
            for name in names:
                path = Path(place, name)
                with contextlib.suppress(FileNotFoundError):  # another process deletes meanwhile
                    sizes[path.relative_to(self._root).as_posix()] = path.stat().st_size
        return sizes

    def read(self, key: str) -> bytes:
        """Read a small object; FileNotFoundError if it is missing."""
        return read_regular(self._root / key)

    def fetch(self, key: str, file: Path) -> None:
        """Write an object's bytes to a new local file; FileNotFoundError if the object is missing."""
        shutil.copyfile(self._root / key, file)

    def put(self, key: str, source: Path, start: int, end: int) -> str:
        """Store bytes of a local file under a key, and verify them there; return their xxh3_128."""
        target, digest = self._root / key, xxhash.xxh3_128()
        make_dirs(target.parent, ROOM)
        with placed(target, ROOM) as new, create(new, ROOM) as file:
            for block in blocks(source, start, end):
                digest.update(block)
                write(file, block, ROOM)
        reach("mirror.verify")
        _require_equal(key, digest_of(target), digest.hexdigest())
        return digest.hexdigest()

    def create(self, key: str, data: bytes) -> None:
        """Store a small object, if there is none of that key; read it to know whose it is."""
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


class ObjectStore:
    """The same below a URL, in a store that fsspec reaches: S3, GCS and others.  Any method may raise any
    exception of its library.
    """

    def __init__(self, url: str, name: str) -> None:
        import fsspec.core

        self.name = name
        self._fs: Any
        # a connection of its own: listings that other parts of the program keep are not used
        self._fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
        self._root = root.rstrip("/")
        self._folders = url.partition("://")[0] not in _NO_FOLDERS

    def keys(self, folder: str) -> dict[str, int]:
        self._fs.invalidate_cache()
        try:
            entries = self._fs.find(f"{self._root}/{folder}", detail=True)
        except FileNotFoundError:
            return {}
        return {path[len(self._root) + 1 :]: int(info["size"]) for path, info in entries.items()}

    def read(self, key: str) -> bytes:
        return bytes(self._fs.cat_file(f"{self._root}/{key}"))

    def fetch(self, key: str, file: Path) -> None:
        self._fs.get_file(f"{self._root}/{key}", str(file))

    def put(self, key: str, source: Path, start: int, end: int) -> str:
        path = self._new(key)
        if end - start > PART_BYTES:  # a checkpoint's file, whole
            self._fs.put_file(str(source), path)
        else:  # a journal may grow meanwhile
            self._fs.pipe_file(path, b"".join(blocks(source, start, end)))
        reach("mirror.verify")
        digest = digest_of(source, start, end)
        if not self._says_equal(path, source, start, end):
            with self._fs.open(path, "rb") as file:
                stored = _hex(xxhash.xxh3_128(), iter(lambda: file.read(_UPLOADED_PART), b""))
            _require_equal(key, stored, digest)
        return digest

    def create(self, key: str, data: bytes) -> None:
        path = self._new(key)
        try:
            # where the store has a conditional put, nobody else's object is replaced
            self._fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            return
        except (NotImplementedError, TypeError, ValueError):  # this store has no such mode
            # two processes may both find nothing, and the later one replaces the earlier one's object
            if not self._fs.exists(path):
                self._fs.pipe_file(path, data)

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{key}")

    def _new(self, key: str) -> str:
        path = f"{self._root}/{key}"
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
        if "-" not in tag:
            return _md5(blocks(source, start, end)) == tag
        ends = [*range(start, end, _UPLOADED_PART), end]
        parts = [bytes.fromhex(_md5(blocks(source, *part))) for part in pairwise(ends)]
        return tag == f"{_md5(parts)}-{len(parts)}"


Place: TypeAlias = Folder | ObjectStore
