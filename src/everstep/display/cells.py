"""Values as people read them in a cell of a table, a line of a terminal, or a page; tables for notebooks."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

TIMES = {"created", "started", "heartbeat", "time", "last_seen"}
"""Names of values that are seconds since 1970."""

Rows = Sequence[Mapping[str, Any]]
_MOST_ROWS, _MOST_COLUMNS, _LONGEST = 25, 20, 120
"""Most rows and columns of a table for a notebook, most characters of a cell."""

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
    """Format a value for people."""
    if value is None or (name == "epoch" and value == 0):  # a run without epochs, or before the first
        return "-"
    if name in TIMES and isinstance(value, int | float):
        return datetime.fromtimestamp(value).strftime("%Y-%m-%d %H:%M:%S")
    if name == "bytes" and isinstance(value, int):
        return size(value)
    return f"{value:.6g}" if isinstance(value, float) else in_line(str(value))


def size(count: float) -> str:
    """Format a number of bytes with a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def flat(
    tree: Mapping[str, Any], above: str = "", is_leaf: Callable[[dict[str, Any]], bool] = lambda _: False
) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of each value in a tree of dictionaries: ("git.commit", "1a2b").

    Args:
        above: what all paths begin with.
        is_leaf: whether a dictionary is a value.
    """
    for name, value in tree.items():
        if isinstance(value, dict) and not is_leaf(value):
            yield from flat(value, f"{above}{name}.", is_leaf)
        else:
            yield f"{above}{name}", value


def is_number_column(name: str, rows: Rows) -> bool:
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


def finite(value: Any) -> Any:
    """Return "NaN", "Infinity" or "-Infinity" for a number that JSON lacks; other values stay as they are."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def notebook_html(title: str, tables: Iterable[tuple[str, Rows, Sequence[str]]]) -> str:
    """Write what a notebook shows: a headline, and tables, each with its caption, rows and columns.

    Only elements and attributes that survive the sanitizers of GitHub, nbviewer and nbconvert; strings of a
    run are text, never markup.
    """
    head = f"<p>{html.escape(in_line(title))}</p>" if title else ""
    return head + "".join(_table(*table) for table in tables if table[1])


def _table(title: str, rows: Rows, columns: Sequence[str]) -> str:
    """Write rows as a table: numbers to the right, the first rows and columns, long strings cut."""

    def written(side: str, text: str) -> str:
        cut = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
        return f'<td align="{side}">{html.escape(cut)}</td>'

    rows = [dict(flat(row)) for row in rows]
    present = dict.fromkeys(name for row in rows for name in row)
    columns = [name for name in columns if name in present] or list(present)
    aligned = {name: "right" if is_number_column(name, rows) else "left" for name in columns[:_MOST_COLUMNS]}
    more = {"rows": len(rows) - _MOST_ROWS, "columns": len(columns) - _MOST_COLUMNS}
    left_out = " and ".join(f"{count} more {what}" for what, count in more.items() if count > 0)
    head = "".join(f"<th>{html.escape(in_line(name))}</th>" for name in aligned)
    body = "".join(
        f"<tr>{''.join(written(side, cell(name, row.get(name))) for name, side in aligned.items())}</tr>"
        for row in rows[:_MOST_ROWS]
    )
    caption = f"<p><b>{html.escape(in_line(title))}</b></p>" if title else ""
    end = f"<p>... and {left_out}</p>" if left_out else ""
    return f"{caption}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{end}"
