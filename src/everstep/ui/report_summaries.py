"""Pictures, texts, histograms and ends of logs that a report carries, in a bounded size."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from everstep.ui.run_files import MissingError, content_of, kind_of, last_lines, newest_summaries
from everstep.views.find_run import Found

STEPS = 10
"""Most steps of a summary in a report: the newest, and others at equal distances."""

SUMMARY_BYTES = 8_000_000
"""Most bytes of all summaries in a report."""

LOG_BYTES, LOGS_BYTES = 50_000, 1_000_000
"""Most bytes of the log of a run, and of all logs in a report."""

_Key = tuple[int, str, str]
"""Place of a run in the report, name of a summary, its kind."""


def carried_summaries(found: Sequence[Found]) -> tuple[list[dict[str, Any]], int]:
    """Return the summaries that a report carries, as JSON, and the number of those that it leaves out.

    Summaries of one name and kind share an entry.  Where there is not room for all, the newest of each name
    comes first.

    Returns:
        Entries {run, name, kind, of, shown}: `of` is the number of all steps; `shown` a list of {step,
            content}, where content is a data URL for an image, else the text.
    """
    noted = {key: noted for at, run in enumerate(found) for key, noted in _noted(at, run).items()}
    shown: dict[_Key, dict[int, str]] = {key: {} for key in noted}
    room = SUMMARY_BYTES
    for key, data in _in_turn(noted):
        content = _content(found[key[0]], data)
        size = len(json.dumps(content))  # as in the file: a character may take six bytes there
        if content is not None and size <= room:
            room -= size
            shown[key][data["step"]] = content
    entries = [_entry(key, len(noted[key]), shown[key]) for key in noted if shown[key]]
    return entries, sum(map(len, noted.values())) - sum(len(one["shown"]) for one in entries)


def _noted(at: int, run: Found) -> dict[_Key, list[dict[str, Any]]]:
    """Return the valid summaries of a run as the journal describes them, by name, the newest step first."""
    steps: dict[_Key, dict[int, dict[str, Any]]] = {}
    with run.database.read() as connection:
        for data in newest_summaries(connection, run.id):
            kind = kind_of(data)
            if kind is not None and isinstance(data.get("step"), int):
                steps.setdefault((at, str(data.get("name")), kind), {}).setdefault(data["step"], data)
    return {key: [each[step] for step in sorted(each, reverse=True)] for key, each in sorted(steps.items())}


def _in_turn(noted: Mapping[_Key, list[dict[str, Any]]]) -> Iterator[tuple[_Key, dict[str, Any]]]:
    """Yield the chosen steps of all names: the newest of each, then the next of each."""
    for row in zip_longest(*([(key, data) for data in _spread(all_of)] for key, all_of in noted.items())):
        yield from (one for one in row if one is not None)


def _spread(noted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Choose at most `STEPS`: both ends, and others at equal distances."""
    if len(noted) <= STEPS:
        return noted
    return [noted[at * (len(noted) - 1) // (STEPS - 1)] for at in range(STEPS)]


def _content(run: Found, data: Mapping[str, Any]) -> str | None:
    """Return a summary as text, a picture as a data URL; None for a picture that cannot be read."""
    try:
        content, media = content_of(run.database, run.facts, data)
    except MissingError:
        return None
    if "image" in data:
        return f"data:{media};base64,{base64.b64encode(content).decode()}"
    return content.decode() if "text" in data else json.dumps(data["histogram"])


def _entry(key: _Key, of: int, shown: Mapping[int, str]) -> dict[str, Any]:
    at, name, kind = key
    steps = [{"step": step, "content": shown[step]} for step in sorted(shown)]
    return {"run": at, "name": name, "kind": kind, "of": of, "shown": steps}


def carried_logs(found: Sequence[Found]) -> list[dict[str, Any]]:
    """Return the end of each run's log that has one, as JSON: {run, text, is_cut}."""
    most = min(LOG_BYTES, LOGS_BYTES // max(1, len(found)))
    ends = ((at, *last_lines(run.database, run.facts, most)) for at, run in enumerate(found))
    return [{"run": at, "text": text, "is_cut": is_cut} for at, text, is_cut in ends if text]
