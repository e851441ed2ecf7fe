"""What may befall a file or a folder of a run."""

from __future__ import annotations

import errno
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path


def becomes_folder(path: Path) -> None:
    clear(path)
    path.mkdir()
    (path / "something").write_text("of somebody")


def becomes_file(path: Path) -> None:
    """At one instant: where a name is missing, a run that trains makes its own file again."""
    other = path.with_name(f"{path.name}.other")
    other.write_text("of somebody")
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    other.replace(path)


def becomes_empty(path: Path) -> None:
    path.write_bytes(b"")


def is_noise(path: Path) -> None:
    path.write_bytes(random.Random(path.name).randbytes(max(path.stat().st_size, 64)))


def is_brackets(path: Path) -> None:
    path.write_bytes(b"[" * 200_000)


def is_other_json(path: Path) -> None:
    path.write_text('{"pid": [1], "host": {"a": 1e999}, "started": "noon", "versions": 3, "body": []}')


def becomes_pipe(path: Path) -> None:
    clear(path)
    os.mkfifo(path)


def becomes_socket(path: Path) -> None:
    clear(path)
    here = os.getcwd()
    os.chdir(path.parent)  # its name may be 107 bytes long
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def leads_to_itself(path: Path) -> None:
    clear(path)
    path.symlink_to(path.name)


def is_gone(path: Path) -> None:
    """Remove it while its owner is at work, and may put a file into a folder meanwhile."""
    while True:
        try:
            return clear(path)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise


def clear(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


WHOLE_FILE: dict[str, Callable[[Path], None]] = {
    "missing": is_gone,
    "folder": becomes_folder,
    "empty": becomes_empty,
    "noise": is_noise,
    "brackets": is_brackets,
    "other JSON": is_other_json,
    "pipe": becomes_pipe,
    "socket": becomes_socket,
    "link to itself": leads_to_itself,
}
TO_A_FOLDER: list[Callable[[Path], None]] = [becomes_file, becomes_pipe, leads_to_itself, is_gone]
"""What may befall a file, and a folder."""
