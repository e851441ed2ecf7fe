"""The small text file `checkpoint`: the name to resume from, and a checksum by which an edit is noticed."""

from __future__ import annotations

import enum
import re
from pathlib import Path
from typing import NamedTuple

import xxhash

from everstep.checkpoint import files
from everstep.checkpoint.format import CheckpointName


class Kind(enum.Enum):
    """What the file is: not there, as we wrote it, changed by a person, or torn by a crash of the disk."""

    ABSENT = enum.auto()
    OURS = enum.auto()
    EDITED = enum.auto()
    TORN = enum.auto()


class Pointer(NamedTuple):
    """The file's kind and its first line: a checkpoint's name; if edited, what the person wrote."""

    kind: Kind
    text: str


def read(path: Path) -> Pointer:
    """Read the file; never fails for what is in it."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return Pointer(Kind.ABSENT, "")
    first, newline, rest = raw.partition(b"\n")
    text = first.decode("utf-8", "replace").strip()
    if rest.strip() == _checksum(first):
        return Pointer(Kind.OURS, text)
    torn = not text or "\0" in text or (not newline and _is_piece(text))
    return Pointer(Kind.TORN if torn else Kind.EDITED, text)


def _is_piece(text: str) -> bool:
    """Whether it is the beginning of a name, as a crash leaves it; anything else a person wrote."""
    # A number that was cut begins with the zeros that fill it: "step-2" is a person's.
    if CheckpointName.matches(text) or re.search(r"-[1-9]\d*$", text):
        return False
    wholes = ("step-00000000", "epoch-0000-step-00000000")
    return any(CheckpointName.matches(text + whole[len(text) :]) for whole in wholes)


def write(path: Path, name: CheckpointName, *, as_edit: bool = False) -> None:
    """Name a checkpoint, durably; `as_edit` leaves the checksum out, so that it wins at the next start."""
    line = str(name).encode()
    files.write_whole(path, line + b"\n" + (b"" if as_edit else _checksum(line) + b"\n"))


def _checksum(line: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(line).encode()
