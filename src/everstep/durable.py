"""Durable file operations: each passes a hazard first, so that a test can crash or fail any of them.

Durable means that a power cut cannot undo an operation once its call has returned.  A failed fsync raises
and is never retried on the same file: the kernel may have dropped the bytes, and would report success the
second time.

A file with a temporary name is a leftover once its process is dead: see `discard_leftovers`.  In every
function, `room` is the first part of the hazards' names ("checkpoint" passes "checkpoint.open" ...).
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import shutil
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from everstep.errors import RunDirError
from everstep.hazard import reach

TMP = ".tmp-"
"""Beginning of temporary names, which end with the id of their process."""

_NO_SUCH_OPERATION = {errno.EINVAL, errno.ENOTSUP}


def require_no_link(path: Path, top: Path) -> None:
    """Refuse to change the target of a link below `top`: the target may belong to another run or user.

    Call this before anything at `path`, or in the folder `path`, is written, moved or deleted.  `top` itself
    may be reached through a link.
    """
    below = path.relative_to(top).parts
    for end in range(1, len(below) + 1):
        place = top.joinpath(*below[:end])
        if place.is_symlink():
            raise RunDirError(
                errno.ELOOP,
                f"it is a link, to {os.readlink(place)}, and nothing is changed through a link in {top}; put "
                "the folder or file itself there (the run directory as a whole may be a link)",
                str(place),
            )


_REMEDIES = {
    errno.ENOSPC: "the disk is full: free space",
    errno.EDQUOT: "the disk quota is used up: free space or raise the quota",
    errno.EROFS: "the file system is read-only: remount it",
    errno.EACCES: "it may not be written: change its permissions",
    errno.EPERM: "it may not be written: change its permissions",
    errno.EIO: "the device fails: look at its health and the system's log, and move the run to another disk",
    errno.ENAMETOOLONG: "a name is too long for the file system: choose shorter names (of a metric, say)",
    errno.ENOENT: "something was deleted, moved or unmounted: bring it back",
    errno.EEXIST: "something else has the name: move it away",
    errno.ENOTDIR: "a file has the name of a folder: move it away",
    errno.EISDIR: "a folder has the name of a file: move it away",
    errno.ENOTEMPTY: "a folder that is not empty has the name: move it away",
    errno.ELOOP: "a link leads there: put the file or folder itself there",
    errno.EFBIG: "a file is too large for the file system or for the limit (ulimit -f): raise it",
    errno.EMFILE: "too many files are open: close some, or raise the limit (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine: close some",
    errno.ENOMEM: "there is too little memory: free some",
    errno.ESTALE: "the file system was lost: mount it again",
    errno.ENODEV: "the device was lost: connect and mount it again",
    errno.ENXIO: "the device was lost: connect and mount it again",
    errno.ETIMEDOUT: "the file system does not answer: look at its server",
}


def remedy(error: BaseException | None) -> str:
    """Describe a failed file operation: what happened, and what to do."""
    if isinstance(error, MemoryError):
        return _REMEDIES[errno.ENOMEM]
    number = error.errno if isinstance(error, OSError) else None
    return _REMEDIES.get(number or 0, "look at the disk")


@contextlib.contextmanager
def no_disk_error(problem: str, path: Path, hint: str = "") -> Iterator[None]:
    """Raise an error of the disk in a block as one of the run directory, with a remedy."""
    try:
        yield
    except RunDirError:
        raise
    except OSError as error:
        problem = f"{problem}: {error.strerror}; {hint or remedy(error)}"
        raise RunDirError(error.errno, problem, str(path)) from error


def temporary(target: Path) -> Path:
    """Return the path beside `target`, on the same file system, at which this process prepares it."""
    return target.with_name(f"{TMP}{target.name}-{os.getpid()}")


@contextlib.contextmanager
def create(path: Path, room: str) -> Iterator[FileIO]:
    """Make a new file for unbuffered writing; fsync it if the block ends well."""
    reach(f"{room}.open")
    with FileIO(path, "x") as file:
        yield file
        reach(f"{room}.fsync")
        os.fsync(file.fileno())


def write(file: FileIO, data: memoryview | bytes, room: str) -> None:
    """Write all of `data`, as a raw write may take only a part."""
    reach(f"{room}.write")
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def fsync_folder(folder: Path, room: str) -> None:
    """Make the names in a folder durable; do nothing if the file system has no such operation."""
    reach(f"{room}.fsync_folder")
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SUCH_OPERATION:
            raise
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path, room: str) -> None:
    """Rename inside a file system; a file at `target` is replaced, a folder with content is not."""
    reach(f"{room}.rename")
    source.replace(target)


def make_dirs(folder: Path, room: str) -> None:
    """Make a folder and those above it, durably, if they do not exist."""
    if folder.is_dir():
        return
    make_dirs(folder.parent, room)
    reach(f"{room}.mkdir")
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
    # Permission to make a folder there does not include permission to read the folder above.
    with contextlib.suppress(PermissionError):
        fsync_folder(folder.parent, room)


def write_whole(path: Path, data: bytes, room: str, *, replace: bool = True) -> None:
    """Write a file whole: either the old content or the new content survives a crash, never a mix.

    With `replace=False` an existing file stays as it is.
    """
    with placed(path, room, replace=replace) as new, create(new, room) as file:
        write(file, data, room)


@contextlib.contextmanager
def placed(path: Path, room: str, *, replace: bool = True) -> Iterator[Path]:
    """Give a path at which a file is written durably; if the block ends well, the file becomes `path`."""
    new = temporary(path)
    # an earlier process with our id may have left a file of this name
    discard(new, room)
    try:
        yield new
        if replace:
            rename(new, path, room)
        else:
            name_first(new, path, room)
    finally:
        discard(new, room)
    # Last: only a rename whose folder is on the disk survives a power cut.
    fsync_folder(path.parent, room)


def name_first(new: Path, path: Path, room: str) -> None:
    """Give `new` its name unless a file has it; without hard links, two processes may both succeed."""
    reach(f"{room}.rename")
    try:
        os.link(new, path)
    except FileExistsError:
        return
    except OSError:
        new.replace(path)


def discard(path: Path, room: str) -> None:
    """Delete a leftover, file or folder, as far as that is possible."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            reach(f"{room}.rmtree")
            shutil.rmtree(path)
        elif os.path.lexists(path):
            reach(f"{room}.unlink")
            path.unlink()


def discard_leftovers(folder: Path, room: str, name: str = "") -> None:
    """Delete leftovers of dead processes directly in `folder`, of any file, or of one with this name.

    Call this before this process saves anything: a leftover with our own process id is then that of an
    earlier process (in containers, ids repeat).
    """
    for path in list(folder.glob(f"{TMP}{glob.escape(f'{name}-') if name else ''}*")):
        pid = path.name.rpartition("-")[2]
        if not (pid.isascii() and pid.isdigit() and int(pid) != os.getpid() and _alive(int(pid))):
            discard(path, room)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
