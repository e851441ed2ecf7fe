"""Text file `checkpoint`: the name to resume from, and a checksum that tells an edit from damage."""

from __future__ import annotations

import enum
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import xxhash

from everstep.checkpoint import files
from everstep.checkpoint.checkpoint_name import CheckpointName
from everstep.untrusted_files import open_regular

_LONGEST = 4096  # bytes that are read: more than the longest path


class PointerKind(enum.Enum):
    """Kind of the file: absent, as everstep wrote it, changed by a person, or damaged."""

    ABSENT = enum.auto()
    OURS = enum.auto()
    EDITED = enum.auto()
    DAMAGED = enum.auto()


class Pointer(NamedTuple):
    """Content of the file.

    Attributes:
        kind: who wrote the file.
        text: the name in the first line; in an edited file the person's line; in a damaged file the name
            that everstep had written, "" if that cannot be found out.
        stands: the first line as it stands.
    """

    kind: PointerKind
    text: str
    stands: str


def read(path: Path, known: Collection[str]) -> Pointer:
    """Read the file; its content, and errors of the disk, raise nothing.

    A first line that names a checkpoint was written by a person, unless the rest of the file shows that
    everstep's own line was cut.  Damage is: one bit away from everstep's bytes, a piece of them, bytes that
    are not text, or a misspelling of the name whose checksum stands in the next line.

    Args:
        known: names of the checkpoints on disk.
    """
    try:
        with open_regular(path) as file:
            raw = file.read(_LONGEST)
    except FileNotFoundError:
        return Pointer(PointerKind.ABSENT, "", "")
    except OSError as error:
        return Pointer(PointerKind.DAMAGED, "", str(error.strerror))
    text = raw.removeprefix(b"\xef\xbb\xbf")  # some editors put this mark first
    first, _, rest = (part.strip(b" \t\r\n") for part in text.partition(b"\n"))
    stands = first.decode("utf-8", "replace")
    if rest == _checksum(first):
        return Pointer(PointerKind.OURS, stands, stands)
    had = _one_bit_off(raw)
    if stands in known and stands != had:
        cut = bool(rest) and _checksum(first).startswith(rest)
        return Pointer(PointerKind.DAMAGED if cut else PointerKind.EDITED, stands, stands)
    if had is None:
        had = next((name for name in known if _checksum(name.encode()) == rest), "")
        piece = b"\n" not in raw and _is_piece(stands, known)
        if not (piece or _is_no_text(first) or _is_misspelt(stands, had)):
            return Pointer(PointerKind.EDITED, stands, stands)
    return Pointer(PointerKind.DAMAGED, had, stands)


def _one_bit_off(raw: bytes) -> str | None:
    """Return the name that everstep wrote, if `raw` differs from its bytes in one bit; else None."""
    for bit in range(min(8 * len(raw), 1024)):
        whole = bytearray(raw)
        whole[bit // 8] ^= 1 << bit % 8
        first, _, rest = bytes(whole).partition(b"\n")
        if rest == _checksum(first) + b"\n":
            return first.decode("utf-8", "replace")
    return None


def _is_no_text(line: bytes) -> bool:
    try:
        text = line.decode()
    except UnicodeDecodeError:
        return True
    return not text or not text.isprintable()


def _is_piece(text: str, known: Collection[str]) -> bool:
    """Whether a text is the beginning of a checkpoint's name, as a crash may leave it."""
    if any(name.startswith(text) for name in known if name != text):
        return True
    # a name that was cut has zeros in front of its number, so a person wrote "step-2"
    if CheckpointName.matches(text) or re.search(r"-[1-9]\d*$", text):
        return False
    wholes = ("step-00000000", "epoch-0000-step-00000000")
    return any(CheckpointName.matches(text + whole[len(text) :]) for whole in wholes)


def _is_misspelt(text: str, name: str) -> bool:
    """Whether a text has the digits of a name and other letters, so that no other name can be meant."""
    return bool(name) and "/" not in text and re.findall(r"\d", text) == re.findall(r"\d", name)


def write(path: Path, name: CheckpointName, *, as_edit: bool = False) -> None:
    """Write a checkpoint's name durably.

    Args:
        as_edit: leave the checksum out, so that the next start resumes from this name as from an edit.
    """
    line = str(name).encode()
    files.write_whole(path, line + b"\n" + (b"" if as_edit else _checksum(line) + b"\n"))


def _checksum(line: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(line).encode()
