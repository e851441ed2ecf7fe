"""What the page shows of one run besides its curves: all that is known of it, its log, its summaries."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from sqlalchemy import select

from everstep.errors import ConfigError
from everstep.index import GONE
from everstep.index.database import Database
from everstep.index.location import id_at
from everstep.index.run_queries import metric_names, newest_facts
from everstep.index.shipping import is_here
from everstep.index.sql_tables import events, runs, segments, stored
from everstep.record import misfit
from everstep.record.journal_format import step_of
from everstep.ui.runs_table import differing, heading, plain, run_id, streams_of
from everstep.untrusted_files import open_below
from everstep.views.describe_run import Found, describe

LOG_BYTES, LARGEST_IMAGE, LONGEST_TEXT = 1 << 18, 32 << 20, 1 << 18
"""Most bytes of a log in one answer and of a picture, and characters of a text: a browser lays all out."""

_IMAGES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif"}
"""First bytes of a picture -> its type.  SVG is left out: it may hold a script."""

Summaries = dict[tuple[str, str], dict[int, dict[str, Any]]]
"""(name, kind) -> step -> summary as the journal describes it; a picture and a text may share a name."""


class MissingError(ConfigError):
    """Nothing has the name in an address."""


def one_run(database: Database, run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page shows of a run, as JSON: `describe`, and what the page needs beside it."""
    entry = Found(database, {**run, "status": run["status"] if _is_there(database, run) else GONE})
    with database.read() as connection:
        facts = describe(connection, entry, steps=False)
        trained = [start for start in facts.pop("segments") if start["badge"] is not None]
        streams = streams_of(metric_names(connection, run["id"]))
        query = select(segments.c.number, segments.c.zero).where(segments.c.run == run["id"])
        zeros = {number: zero for number, zero in connection.execute(query)}
        config, parent = facts["facts"].get("config"), facts["facts"].get("parent")
        name = str(parent.get("run")) if isinstance(parent, dict) else ""
        forked = connection.execute(select(runs).where(runs.c.name == name)).mappings().one_or_none()
        parents = {} if forked is None else newest_facts(connection, [forked["id"]], names=["config"])
    configs = [config, *(each.get("config") for each in parents.values())]
    trees = [plain(tree) if isinstance(tree, dict) else {} for tree in configs]
    for rollback in facts["rollbacks"]:
        rollback["to"] = step_of(rollback["checkpoint"])
    return {
        **facts,
        **heading(run),
        "host": run["host"],
        "parent": None if forked is None else run_id(dict(forked)),
        "config_changed": differing(trees) if len(trees) > 1 else [],
        "starts": [start | {"zero": zeros[start["number"]]} for start in trained],
        "streams": streams,
        "summaries": [
            {"name": name, "kind": kind, "steps": list(steps)}
            for (name, kind), steps in summaries_of(database, run["id"]).items()
        ],
    }


def _is_there(database: Database, run: Mapping[str, Any]) -> bool:
    """Whether the run's directory is here: at the path of another machine's run there may be another run."""
    return is_here(database, run["host"]) and id_at(run["path"]) == run["name"]


def summaries_of(database: Database, run: int) -> Summaries:
    """Return the valid summaries of a run, in their order; of a step that was repeated the newest."""
    is_valid = (segments.c.number == events.c.segment) & (events.c.offset < segments.c.valid_to)
    query = select(events.c.data).join(segments, is_valid & (segments.c.run == events.c.run))
    query = query.where(events.c.run == run, events.c.kind == "summary")
    summaries: Summaries = {}
    with database.read() as connection:
        for text in connection.execute(query.order_by(events.c.segment, events.c.offset)).scalars():
            data = stored(text)
            kind = next((kind for kind in ("image", "text", "histogram") if kind in data), None)
            if kind is not None and not misfit("summary", data):
                summaries.setdefault((data["name"], kind), {})[data["step"]] = data
    return summaries


def content_of(database: Database, run: Mapping[str, Any], data: Mapping[str, Any]) -> tuple[bytes, str]:
    """Return the content of a summary that the journal describes, and its type: a picture, or plain text."""
    if "image" not in data:
        text = data["text"] if isinstance(data.get("text"), str) else json.dumps(data.get("histogram"))
        if len(text) > LONGEST_TEXT:
            text = f"{text[:LONGEST_TEXT]}\n... and {len(text) - LONGEST_TEXT:,} characters more"
        return text.encode("utf-8", "replace"), "text/plain; charset=utf-8"
    place = data["image"]["file"]
    with _open_file(database, run, place) as file:
        picture = file.read(LARGEST_IMAGE + 1)
    if len(picture) > LARGEST_IMAGE:
        raise MissingError(f"{place} has more than {LARGEST_IMAGE:,} bytes; open the file itself")
    media = next((media for head, media in _IMAGES.items() if picture.startswith(head)), None)
    if media is None:
        raise MissingError(f"{place} is not a picture; give another summary")
    return picture, media


def last_lines(database: Database, run: Mapping[str, Any], most: int = LOG_BYTES) -> dict[str, Any]:
    """Return whole lines from the end of a run's log, at most `most` bytes, and whether these are not all."""
    try:
        with _open_file(database, run, "logs/run.log") as file:
            begin = max(0, file.seek(0, os.SEEK_END) - most)
            file.seek(begin)
            data = file.read(most)
    except MissingError:
        return {"text": "", "is_cut": False}
    first = data.find(b"\n") + 1 if begin else 0
    return {"text": data[first:].decode("utf-8", "replace"), "is_cut": begin > 0}


def _open_file(database: Database, run: Mapping[str, Any], place: str) -> FileIO:
    """Open a file below a run's directory: a regular file, reached through no link."""
    parts = Path(place).parts
    if Path(place).is_absolute() or ".." in parts or not parts or "\0" in place:
        raise MissingError(f"{place!r} does not lie in the run; give a file of the run")
    if not _is_there(database, run):
        raise MissingError(f"{place} is not a file of the run on this machine; look where the run trained")
    try:
        return open_below(Path(run["path"]), parts)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "its name is not one of a file"
        raise MissingError(f"{place[:200]!r} cannot be read ({reason}); check the run's files") from None
