"""Durable file operations: each passes a hazard point first, so that a test can crash or fail any of them.

Durable means: after the call returns, a power cut cannot undo it.  A failed fsync raises and is never
retried on the same file: the kernel may have dropped the bytes and would report success the second time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from everstep.errors import RunDirError
from everstep.hazard import reach

TMP = ".tmp-"
"""Names that begin so are leftovers once their process is dead; the name ends in its process id."""

_NO_SUCH_OPERATION = {errno.EINVAL, errno.ENOTSUP}
_CAUSES = {
    errno.ENOSPC: "the disk is full: free space or choose another directory",
    errno.EDQUOT: "the disk quota is used up: free space, raise the quota or choose another directory",
    errno.EROFS: "the file system is read-only: remount it or choose another directory",
    errno.EACCES: "it may not be written: change its permissions or choose another directory",
    errno.EPERM: "it may not be written: change its permissions or choose another directory",
    errno.ENOENT: "it does not exist: create it or choose another directory",
    errno.ENOTDIR: "it is a file: choose another directory",
}


def temporary(target: Path) -> Path:
    """The path beside `target` (so on its file system) under which this process prepares it."""
    return target.with_name(f"{TMP}{target.name}-{os.getpid()}")


@contextlib.contextmanager
def create(path: Path) -> Iterator[FileIO]:
    """Open the new file `path` for writing without a buffer; fsync it if the block ends well."""
    reach("checkpoint.open")
    with FileIO(path, "x") as file:
        yield file
        reach("checkpoint.fsync")
        os.fsync(file.fileno())


def write(file: FileIO, data: memoryview | bytes) -> None:
    """Write all of `data` (a raw write may take less)."""
    reach("checkpoint.write")
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def sync_dir(path: Path) -> None:
    """Make the entries of a folder durable; where the file system has no such operation, nothing."""
    reach("checkpoint.fsync_dir")
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_SUCH_OPERATION:
            raise
    finally:
        os.close(fd)


def make_dir(path: Path) -> None:
    """Create a folder durably unless it exists; its parent must."""
    if not path.is_dir():
        reach("checkpoint.mkdir")
        path.mkdir()
        sync_dir(path.parent)


def rename(source: Path, target: Path) -> None:
    """Rename within one file system; a file at `target` is replaced, a folder with content is not."""
    reach("checkpoint.rename")
    source.replace(target)


def move(source: Path, folder: Path, name: str) -> Path:
    """Move `source` durably into `folder` (created if need be) as `name`, or `name.2` ... if taken."""
    make_dir(folder)
    target, count = folder / name, 1
    while target.exists():
        count += 1
        target = folder / f"{name}.{count}"
    rename(source, target)
    try:
        sync_dir(folder)
        sync_dir(source.parent)
    except OSError:
        put_back(target, source)
        raise
    return target


def put_back(moved: Path, source: Path) -> None:
    """Undo a rename as far as that is possible, after a later operation failed."""
    with contextlib.suppress(OSError):
        rename(moved, source)


def replace_text(path: Path, data: bytes) -> None:
    """Give the file `path` a new content: the old one or the new one survives a crash, never a mix."""
    new = temporary(path)
    discard(new)
    try:
        with create(new) as file:
            write(file, data)
        rename(new, path)
        sync_dir(path.parent)
    except BaseException:
        discard(new)
        raise


def unlink(path: Path) -> None:
    """Delete one file."""
    reach("checkpoint.unlink")
    path.unlink()


def remove_tree(path: Path) -> None:
    """Delete a folder and what is in it.  Not atomic: what has a meaning is removed by `retire`."""
    reach("checkpoint.rmtree")
    shutil.rmtree(path)


def retire(folder: Path) -> None:
    """Delete a checkpoint's folder: under its own name it is whole until it is gone."""
    trash = to_trash(folder)
    sync_dir(folder.parent)
    remove_tree(trash)


def to_trash(folder: Path) -> Path:
    """Take a folder's name away; what is left, at the path returned, goes with the leftovers."""
    trash = temporary(folder.with_name(f"trash-{folder.name}"))
    discard(trash)
    rename(folder, trash)
    return trash


def discard(path: Path) -> None:
    """Delete a leftover, file or folder, if it is there and as far as that is possible."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        elif path.exists():
            unlink(path)


def discard_leftovers(folder: Path) -> None:
    """Delete what dead processes left half done directly in `folder`.

    Call it before this process saves anything: a leftover with our own process id is then one of an
    earlier process (in containers, ids repeat).
    """
    for path in list(folder.glob(f"{TMP}*")):
        pid = path.name.rpartition("-")[2]
        if not (pid.isdigit() and int(pid) != os.getpid() and _alive(int(pid))):
            discard(path)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def trial_write(run_dir: Path) -> None:
    """Write, sync and delete a small file in `run_dir`, so that a bad disk is found before training.

    Raises:
        RunDirError: it cannot be done (a file, read-only, full, no quota left, no permission).
    """
    path = temporary(run_dir / "trial")
    try:
        discard(path)
        with create(path) as file:
            write(file, bytes(4096))
        unlink(path)
        sync_dir(run_dir)
    except OSError as error:
        discard(path)
        cause = _CAUSES.get(error.errno or 0, "choose another directory")
        raise RunDirError(f"run directory {run_dir} cannot be used ({error.strerror}): {cause}") from error


def forecast(run_dir: Path, bytes_needed: int) -> None:
    """Refuse early where a save cannot work: too little space for `bytes_needed`, or no writing at all.

    Raises:
        RunDirError: names the directory, the bytes needed and free, and what to do.
    """
    trial_write(run_dir)
    free = shutil.disk_usage(run_dir).free
    if free < bytes_needed:
        raise RunDirError(
            f"run directory {run_dir}: checkpoints need {bytes_needed:,} bytes, {free:,} are free on its "
            "disk: free space, choose another directory, or keep fewer checkpoints"
        )
