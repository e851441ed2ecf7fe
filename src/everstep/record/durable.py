"""Files that exist whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from everstep import hazard


def fsync_folder(folder: Path, point: str) -> None:
    """Make the names in `folder` durable; `point` names the hazard that it passes."""
    hazard.reach(point)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes, point: str, *, replace: bool = True) -> None:
    """Write a file beside its place, make it durable, and give it its name.

    Args:
        path: the file; its folder exists.
        data: its content.
        point: prefix of the hazards that it passes: POINT.write, .fsync, .rename, .fsync_folder.
        replace: False to leave a file alone that has the name already.

    Raises:
        OSError: the disk refuses; the file is what it was.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb") as file:
            hazard.reach(f"{point}.write")
            file.write(data)
            file.flush()
            hazard.reach(f"{point}.fsync")
            os.fsync(file.fileno())
        hazard.reach(f"{point}.rename")
        if replace or not _linked(beside, path):
            os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    fsync_folder(path.parent, f"{point}.fsync_folder")


def _linked(beside: Path, path: Path) -> bool:
    """Whether `path` is there now, by this call or before it; False where the disk has no hard links."""
    try:
        os.link(beside, path)
    except FileExistsError:
        return True
    except OSError:
        return False
    return True
