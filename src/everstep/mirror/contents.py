"""The list of contents: which bytes in the mirror are which file of the run.

    contents/00000007.json      {"checksum": ..., "body": {...}}: one list; the newest whole list counts
    files/00000007/PATH         files that were uploaded for list 7

Nothing in a mirror is ever changed: an upload adds files, then a list with the next number, which some stores
create only if nobody else has created that number.  So the mirror is a whole run at every instant, and a list
is also the answer to "am I still the last?".  The body of a list has:

    format, number, created     version of this form, number of the list, seconds since 1970
    run                         the content of the run's `run.json`
    generation, holder          how often a start has taken the mirror over; who did so last, see `Holder`
    files                       {PATH: [[KEY, BYTES, XXH3_128], ...]}: the parts of each file, in their order
    notes                       {PATH: TEXT}: files so small that the list has them, each byte as a character

A checkpoint's file is one part.  A journal grows, so it is cut into parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import xxhash

from everstep.errors import MirrorError
from everstep.untrusted_files import Count, Seconds, is_file_name, misfits, parse_json

FORMAT = 1
"""Version of a list, as written."""

FOLDERS = ("checkpoints", "best", "journal")
"""Folders of a run directory of which a mirror has files."""
NOTES = ("checkpoint", "labels.json", "pins.json")
"""Small files of a run directory that a list has."""

_LIST = re.compile(rb'\{"checksum":"([0-9a-f]{32})","body":(\{.*\})\}\n', re.DOTALL)
_NUMBER = re.compile(r"contents/([0-9]{8,})\.json")
_SHAPE: dict[str, Any] = {
    "number": Count,
    "run": dict,
    "generation": Count,
    "created": Seconds,
    "notes": dict[str, str],
    "files": dict[str, list[tuple[str, Count, str]]],
    "holder": {"token": str, "host": str, "pid": Count, "directory": str, "ended": bool},
}


class Part(NamedTuple):
    """Bytes of a file, or of a part of it: their key in the mirror, their number, their xxh3_128."""

    key: str
    bytes: int
    digest: str


@dataclass(frozen=True)
class Holder:
    """Start that has taken the mirror over: a random token, where it runs, whether it said that it ended."""

    token: str
    host: str
    pid: int
    directory: str
    ended: bool = False


@dataclass(frozen=True)
class Contents:
    """List of contents, as the module's description says."""

    number: int
    run: dict[str, Any]
    generation: int
    holder: Holder
    created: float
    files: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"contents/{self.number:08d}.json"

    def keys(self) -> set[str]:
        return {part.key for parts in self.files.values() for part in parts}

    def size(self, path: str) -> int:
        """Number of bytes of a file; 0 if the mirror has no such file."""
        return sum(part.bytes for part in self.files.get(path, ()))

    def packed(self) -> bytes:
        body = {"format": FORMAT, **asdict(self), "files": {path: list(p) for path, p in self.files.items()}}
        text = json.dumps(body, separators=(",", ":")).encode()
        return b'{"checksum":"%s","body":%s}\n' % (xxhash.xxh3_128_hexdigest(text).encode(), text)


def number_of(key: str) -> int | None:
    """Parse the number in the key of a list; None for any other key."""
    match = _NUMBER.fullmatch(key)
    return int(match[1]) if match else None


def parse(data: bytes, where: str) -> Contents | None:
    """Read a list of contents of the mirror `where`; None if it is torn or damaged."""
    match = _LIST.fullmatch(data)
    if match is None or xxhash.xxh3_128_hexdigest(match[2]).encode() != match[1]:
        return None
    try:
        body = parse_json(match[2])
        if body.pop("format") != FORMAT or any(misfits(body, _SHAPE)):
            raise ValueError(f"it is not a list of format {FORMAT}")
        files = {path: tuple(Part(*part) for part in parts) for path, parts in body["files"].items()}
        contents = Contents(**body | {"files": files, "holder": Holder(**body["holder"])})
        for note in contents.notes.values():
            note.encode("latin-1")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MirrorError(
            f"the mirror {where} has a list of contents that this everstep cannot read ({error!r:.200}): "
            "nothing was taken from it; give another mirror"
        ) from error
    # it may come from anybody: a path could lead out of the run directory, a key out of the mirror
    odd = [path for path in files if path.split("/")[0] not in FOLDERS]
    odd += [path for path in (*files, *contents.keys()) if not all(map(is_file_name, path.split("/")))]
    odd += [name for name in contents.notes if name not in NOTES]
    if odd:
        raise MirrorError(
            f"the mirror {where} names {odd[0]!r:.200}, which is not a file of a run: nothing was taken from "
            "it; give another mirror"
        )
    return contents
