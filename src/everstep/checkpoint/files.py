"""The file operations of checkpoints, under the hazard points "checkpoint.*"; see `everstep.durable`."""

from __future__ import annotations

import contextlib
import errno
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


def write_new(path: Path, data: bytes) -> None:
    """Write the new file `path`; its folder is not synced."""
    with create(path) as file:
        write(file, data)


def make_dir(path: Path) -> None:
    """Create a folder durably unless it exists; its parent must."""
    if not path.is_dir():
        reach("checkpoint.mkdir")
        path.mkdir()
        fsync_folder(path.parent)  # a power cut may take a name that was not synced


def move(source: Path, folder: Path, name: str, *, top: Path) -> Path:
    """Move `source` durably into `folder` (created if need be) as `name`, or `name.2` ... if taken.

    Raises:
        RunDirError: a link below `top` leads to one of them.
    """
    require_no_link(source, top)
    require_no_link(folder, top)
    make_dir(folder)
    target, count = folder / name, 1
    while os.path.lexists(target):
        count += 1
        target = folder / f"{name}.{count}"
    rename(source, target)
    # The new name is synced first: a power cut in between leaves two names, not none.
    try:
        fsync_folder(folder)
        fsync_folder(source.parent)
    except OSError:
        put_back(target, source)
        raise
    return target


def put_back(moved: Path, source: Path) -> None:
    """Undo a rename as far as that is possible, after a later operation failed."""
    with contextlib.suppress(OSError):
        rename(moved, source)


def unlink(path: Path) -> None:
    """Delete one file."""
    reach("checkpoint.unlink")
    path.unlink()


def retire(folder: Path, *, top: Path) -> None:
    """Delete a checkpoint's folder: under its own name it is whole until it is gone.

    Raises:
        RunDirError: a link below `top` leads to it.
        NotADirectoryError: it is none, so no checkpoint; to delete a pipe as a folder would hang.
    """
    require_no_link(folder, top)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    # The rename is durable before anything is deleted: a kill leaves trash, not half a checkpoint.
    trash = to_trash(folder)
    fsync_folder(folder.parent)
    reach("checkpoint.rmtree")
    shutil.rmtree(trash)


def to_trash(folder: Path) -> Path:
    """Take a folder's name away; what is left, at the path returned, goes with the leftovers."""
    trash = temporary(folder.with_name(f"trash-{folder.name}"))
    discard(trash)
    rename(folder, trash)
    return trash


def trial_write(run_dir: Path) -> None:
    """Write, sync and delete a small file in `run_dir`, so that a bad disk is found before training.

    Raises:
        RunDirError: it cannot be done (a file, read-only, full, no quota left, no permission).
    """
    path = temporary(run_dir / "trial")
    try:
        discard(path)
        write_new(path, bytes(4096))
        unlink(path)
        fsync_folder(run_dir)
    except OSError as error:
        discard(path)
        raise RunDirError(
            f"run directory {run_dir} cannot be used ({error.strerror}): {remedy(error)}, or choose another "
            "directory"
        ) from error


def forecast(run_dir: Path, bytes_needed: int) -> None:
    """Refuse early where a save cannot work: too little space for `bytes_needed`.

    Raises:
        RunDirError: names the directory, the bytes needed and free, and what to do.
    """
    free = shutil.disk_usage(run_dir).free
    if free < bytes_needed:
        raise RunDirError(
            f"run directory {run_dir}: checkpoints need {bytes_needed:,} bytes, {free:,} are free on its "
            "disk: free space, choose another directory, or keep fewer checkpoints"
        )
