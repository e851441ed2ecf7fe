"""The log of a run, and its summaries: pictures, texts and histograms of `add_summary`."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select

from everstep.errors import ConfigError
from everstep.index.database import Database
from everstep.index.readers import id_at
from everstep.index.shipping import is_here
from everstep.index.sql_tables import events, segments, stored
from everstep.record import misfit
from everstep.untrusted_files import open_below

LOG_BYTES = 1 << 20
"""Most bytes of a log in one answer."""

LARGEST_IMAGE = 32 << 20

MOST_PIXELS = 1 << 25
"""Most pixels of a picture: a browser takes 4 bytes of memory for each, however small the file is."""

LONGEST_TEXT = 1 << 18
"""Most characters of a text; a browser lays them all out."""

_IMAGES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
}
"""First bytes of a picture -> its type.  SVG is left out: it may hold a script."""


class MissingError(ConfigError):
    """Nothing has the name in an address."""


def kind_of(data: Mapping[str, Any]) -> str | None:
    """Return what a summary is; a picture and a text of one step may have the same name."""
    return next((kind for kind in ("image", "text", "histogram") if kind in data), None)


def summary(
    database: Database, run: Mapping[str, Any], name: str, step: int, kind: str | None = None
) -> tuple[bytes, str]:
    """Return a summary of a run and its type: a picture, or plain text.

    Args:
        kind: "image", "text" or "histogram"; None for the newest summary of any kind.
    """
    with database.read() as connection:
        found = (data for data in newest_summaries(connection, run["id"]) if kind in (None, kind_of(data)))
        data = next((one for one in found if (one.get("name"), one.get("step")) == (name, step)), None)
    if data is None:
        told = "summary" if kind is None else f"{kind[:40]} summary"
        raise MissingError(f"the run has no {told} {name!r} at step {step}; give one of its summaries")
    return content_of(database, run, data)


def newest_summaries(connection: Connection, run: int) -> Iterator[dict[str, Any]]:
    """Yield the valid summaries of a run as the journal describes them, the newest first."""
    there = (segments.c.number == events.c.segment) & (events.c.offset < segments.c.valid_to)
    chosen = select(events.c.data).join(segments, there & (segments.c.run == events.c.run))
    chosen = chosen.where(events.c.run == run, events.c.kind == "summary")
    newest_first = chosen.order_by(events.c.segment.desc(), events.c.offset.desc())
    told = (stored(data) for data in connection.execute(newest_first).scalars())
    yield from (data for data in told if not misfit("summary", data))


def content_of(database: Database, run: Mapping[str, Any], data: Mapping[str, Any]) -> tuple[bytes, str]:
    """Return the content of a summary that the journal describes, and its type: a picture, or plain text."""
    if "image" not in data:
        text = (
            data["text"] if isinstance(data.get("text"), str) else json.dumps(data.get("histogram"), indent=1)
        )
        if len(text) > LONGEST_TEXT:
            text = f"{text[:LONGEST_TEXT]}\n... and {len(text) - LONGEST_TEXT:,} characters more"
        return text.encode("utf-8", "replace"), "text/plain; charset=utf-8"
    place = data["image"]["file"]
    with _opened(database, run, place) as file:
        picture = file.read(LARGEST_IMAGE + 1)
    if len(picture) > LARGEST_IMAGE:
        raise MissingError(f"{place} has more than {LARGEST_IMAGE:,} bytes; open the file itself")
    media = next((media for head, media in _IMAGES.items() if picture.startswith(head)), None)
    if media is None:
        raise MissingError(f"{place} is not a picture; give another summary")
    if (pixels := _pixels(picture, media)) > MOST_PIXELS:
        raise MissingError(f"{place} has {pixels:,} pixels, {MOST_PIXELS:,} are shown; open the file itself")
    return picture, media


def _pixels(picture: bytes, media: str) -> int:
    """Return the pixels that a browser makes of a picture, by its header; 0 for a picture without a size."""
    if media == "image/png":
        width, height = struct.unpack(">II", picture[16:24].ljust(8, b"\0"))
    elif media == "image/gif":
        width, height = struct.unpack("<HH", picture[6:10].ljust(4, b"\0"))
    else:
        width, height = _jpeg_size(picture)
    return int(width * height)


def _jpeg_size(picture: bytes) -> tuple[int, int]:
    """Return width and height in a JPEG's frame header; (0, 0) without one."""
    at = 2
    while at + 9 <= len(picture) and picture[at] == 0xFF:
        marker, length = picture[at + 1], int.from_bytes(picture[at + 2 : at + 4])
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack(">HH", picture[at + 5 : at + 9])
            return width, height
        at += 1 if marker == 0xFF else 2 + length
    return 0, 0


def log(database: Database, run: Mapping[str, Any], after: int) -> dict[str, Any]:
    """Return the log of a run after some bytes of it: at most its last `LOG_BYTES`, from a whole line on.

    A log that is shorter than `after` was replaced: it comes from its beginning, and `next` is less than
    `after`.
    """
    _, end, text = _end_of_log(database, run, after, LOG_BYTES)
    return {"next": end, "text": text}


def last_lines(database: Database, run: Mapping[str, Any], most: int) -> tuple[str, bool]:
    """Return whole lines from the end of a run's log, at most `most` bytes, and whether these are not all."""
    begin, _, text = _end_of_log(database, run, 0, most)
    return text, begin > 0


def _end_of_log(database: Database, run: Mapping[str, Any], after: int, most: int) -> tuple[int, int, str]:
    """Return whole lines after some bytes of the log, and the bytes at which they begin and end."""
    try:
        with _opened(database, run, "logs/run.log") as file:
            size = file.seek(0, os.SEEK_END)
            after = after if after <= size else 0
            begin = max(after, size - most)
            file.seek(begin)
            data = file.read(most)
    except MissingError:
        return after, after, ""
    first = data.find(b"\n") + 1 if begin > after else 0
    end = data.rfind(b"\n") + 1  # a line that is being written comes whole, later
    if not end and len(data) == most:
        end = most  # a line that is longer than an answer comes in parts
    return begin + first, begin + end, data[first:end].decode("utf-8", "replace")


def _opened(database: Database, run: Mapping[str, Any], place: str) -> FileIO:
    """Open a file below a run's directory: a regular file, reached through no link."""
    top, parts = Path(run["path"]), Path(place).parts
    if Path(place).is_absolute() or ".." in parts or not parts or "\0" in place:
        raise MissingError(f"{place!r} does not lie in the run; give a file of the run")
    if not is_here(database, run["host"]) or id_at(top) != run["name"]:
        raise MissingError(f"{place} is not a file of the run on this machine; look where the run trained")
    try:
        return open_below(top, parts)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "its name is not one of a file"
        raise MissingError(f"{place[:200]!r} cannot be read ({why}); check the run's files") from None
