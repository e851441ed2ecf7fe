"""Values as people read them in a cell of a table, a line of a terminal, or a page; trees of JSON values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

TIMES = {"created", "started", "heartbeat", "time", "last_seen"}
"""Names of values that are seconds since 1970."""

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that move the cursor, change colours or the writing direction, or are not valid."""


def shown(text: str) -> str:
    """Escape control characters, except line ends and tabs, so that any string is safe in a terminal."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def in_line(text: str) -> str:
    """Escape as `shown` does, for a part of a line: line ends and tabs, too."""
    return shown(text).replace("\n", "\\n").replace("\t", "\\t")


def cell(name: str, value: Any) -> str:
    if value is None or (name == "epoch" and value == 0):  # a run without epochs, or before the first
        return "-"
    if name in TIMES and isinstance(value, int | float) and 0 <= value < 1e11:  # else a metric of this name
        return datetime.fromtimestamp(value).strftime("%Y-%m-%d %H:%M:%S")
    if name == "duration" and isinstance(value, int | float):
        return span(value)
    if name.endswith("bytes") and "." not in name and isinstance(value, int):  # and no setting
        return size(value)
    return f"{value:.6g}" if isinstance(value, float) else in_line(str(value))


def size(count: float) -> str:
    """Format a number of bytes with a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def span(seconds: float) -> str:
    """Format seconds with the unit that suits them: "8.1 s", "12 min", "3.5 h", "9.0 d"."""
    units = {"d": 86400, "h": 3600, "min": 60}
    unit, length = next((each for each in units.items() if seconds >= 0.99 * each[1]), ("s", 1))
    return f"{seconds / length:.{int(seconds / length < 9.95)}f} {unit}"


def plural(count: int, noun: str) -> str:
    """Return "1 run", "2 runs"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of each value in a tree of dictionaries: ("git.commit", "1a2b")."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def is_number_column(name: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a column of a table has numbers, which stand to the right."""
    values = [row.get(name) for row in rows if row.get(name) is not None]
    return name not in TIMES and bool(values) and all(isinstance(value, int | float) for value in values)


def with_leaves(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """Copy a tree; `leaf` gives the new value for each leaf, and for each key as a string."""
    if isinstance(tree, Mapping):
        return {leaf(str(key)): with_leaves(item, leaf) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return [with_leaves(item, leaf) for item in tree]
    return leaf(tree)


def json_safe(value: Any) -> Any:
    """Return "NaN", "Infinity" or "-Infinity" for a number that JSON lacks; other values stay as they are."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
