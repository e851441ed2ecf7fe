"""File operations of checkpoints, at hazards named "checkpoint.*"; see `everstep.durable`."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
from functools import partial
from pathlib import Path

from everstep import durable
from everstep.durable import remedy, require_no_link, temporary
from everstep.errors import RunDirError
from everstep.hazard import reach

create = partial(durable.create, room="checkpoint")
write = partial(durable.write, room="checkpoint")
write_whole = partial(durable.write_whole, room="checkpoint")
fsync_folder = partial(durable.fsync_folder, room="checkpoint")
rename = partial(durable.rename, room="checkpoint")
make_dirs = partial(durable.make_dirs, room="checkpoint")
discard = partial(durable.discard, room="checkpoint")
discard_leftovers = partial(durable.discard_leftovers, room="checkpoint")


def disk_failed(error: BaseException) -> bool:
    """Whether an error of a save comes from the disk or lack of memory, and not from a bug in everstep."""
    bugs = {None, errno.EBADF, errno.EFAULT, errno.EINVAL}
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno not in bugs)


def write_new(path: Path, data: bytes) -> None:
    with create(path) as file:
        write(file, data)


def make_dir(path: Path) -> None:
    """Create a folder durably, unless there is one; the parent must exist."""
    if not path.is_dir():
        reach("checkpoint.mkdir")
        path.mkdir()
        fsync_folder(path.parent)  # a power cut may take away a name that was not synced


def move(source: Path, folder: Path, name: str, *, top: Path) -> Path:
    """Move `source` durably into `folder` as `name`, or as `name.2`, `name.3` ... if the name is taken."""
    require_no_link(source, top)
    require_no_link(folder, top)
    make_dir(folder)
    names = (folder / (f"{name}.{count}" if count > 1 else name) for count in itertools.count(1))
    target = next(path for path in names if not os.path.lexists(path))
    rename(source, target)
    # the new name is synced first: a power cut in between leaves two names instead of none
    try:
        fsync_folder(folder)
        fsync_folder(source.parent)
    except OSError:
        put_back(target, source)
        raise
    return target


def put_back(moved: Path, source: Path) -> None:
    """Undo a rename after a later operation failed; where the disk refuses, the new name stays."""
    with contextlib.suppress(OSError):
        rename(moved, source)


def unlink(path: Path) -> None:
    reach("checkpoint.unlink")
    path.unlink()


def retire(folder: Path, *, top: Path) -> None:
    """Delete a checkpoint's folder; as long as the folder has its name, it is whole."""
    require_no_link(folder, top)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    # the rename is durable before anything is deleted: a kill leaves trash, not half a checkpoint
    trash = to_trash(folder)
    try:
        fsync_folder(folder.parent)
    except OSError:
        put_back(trash, folder)  # so that the next retention finds it
        raise
    reach("checkpoint.rmtree")
    shutil.rmtree(trash)


def to_trash(folder: Path) -> Path:
    """Rename a folder to a temporary name, and return its path; leftovers of that name are deleted."""
    trash = temporary(folder.with_name(f"trash-{folder.name}"))
    discard(trash)
    rename(folder, trash)
    return trash


def trial_write(run_dir: Path) -> None:
    """Write, sync and delete a small file in `run_dir`, so that a bad disk is found before training."""
    path = temporary(run_dir / "trial")
    try:
        discard(path)
        write_new(path, bytes(4096))
        unlink(path)
        fsync_folder(run_dir)
    except OSError as error:
        discard(path)
        what = f"run directory {run_dir} cannot be used ({error.strerror})"
        raise RunDirError(f"{what}: {remedy(error)}, or choose another directory") from error


def forecast(run_dir: Path, bytes_needed: int) -> None:
    """Refuse a disk with too little space for checkpoints, before training."""
    free = shutil.disk_usage(run_dir).free
    if free < bytes_needed:
        raise RunDirError(
            f"run directory {run_dir}: checkpoints need {bytes_needed:,} bytes, {free:,} are free on its "
            "disk: free space, choose another directory, or keep fewer checkpoints"
        )
