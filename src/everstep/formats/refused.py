"""Refusal of a file of weights."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from everstep.errors import CheckpointError
from everstep.untrusted_files import is_file_name


def refuse(
    path: Path, how: str, cause: Exception | None = None, remedy: str = "give another copy of it"
) -> NoReturn:
    """Raise the error of a file of weights that cannot be read."""
    raise CheckpointError(f"{path} {how}; {remedy}") from cause


def unreadable(path: Path, error: OSError) -> NoReturn:
    """Raise the error of a file that is missing or cannot be read."""
    refuse(
        path,
        "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})",
        error,
    )


def inside(folder: Path, name: object, whose: Path) -> Path:
    """Return the path of a file of a folder; `whose` is the file that names it.

    Raises:
        CheckpointError: the name leads out of the folder, or into one of its folders.
    """
    if not is_file_name(name):
        refuse(whose, f"names the file {name!r:.200}, which is not a name in its folder and is not followed")
    return folder / name
