"""Output of the commands: JSON for programs, tables for people."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import click

from everstep.redaction import redacted

_NARROWEST, _READABLE = 8, 20
"""Characters that a string keeps at least, and should keep, in a table that is too wide."""
TIMES = {"created", "started", "heartbeat", "time", "last_seen"}
"""Names of values that are seconds since 1970."""


_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that move the cursor, change colours or the writing direction, or are not valid."""


def shown(text: str) -> str:
    """Escape control characters, except line ends and tabs, so that any string is safe in a terminal."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def in_line(text: str) -> str:
    """Escape as `shown` does, for a part of a line: line ends and tabs, too."""
    return shown(text).replace("\n", "\\n").replace("\t", "\\t")


def say(text: str = "", *, err: bool = False) -> None:
    """Print lines for people."""
    click.echo(shown(text), err=err)


def print_json(value: Any) -> None:
    """Print strict JSON: "nan", "inf" and "-inf" are strings, which every language can read back."""
    click.echo(json.dumps(_strict(value), indent=1))


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value


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


def print_table(
    rows: Iterable[Mapping[str, Any]], columns: Sequence[str], indent: str = "", spare: Sequence[str] = ()
) -> None:
    """Print rows in columns: numbers to the right, strings to the left.

    In a terminal, or if COLUMNS gives a width, a table that is too wide loses the columns `spare`, in this
    order, and long strings lose their middle; numbers and times stay whole.  In a pipe nothing is cut.
    """
    rows = list(rows)
    room = _room()
    table = _TextTable(rows, columns)
    if room is not None:
        room -= len(indent)
        for name in spare:
            if table.least(_READABLE) > room:
                columns = [column for column in columns if column != name]
                table = _TextTable(rows, columns)
        table.fit(room)
    for line in table.lines():
        say((indent + line).rstrip())


class _TextTable:
    def __init__(self, rows: list[Mapping[str, Any]], columns: Sequence[str]) -> None:
        self._cells = [[cell(name, row.get(name)) for name in columns] for row in rows]
        self._columns = [in_line(name) for name in columns]
        self._right = [_is_number_column(name, rows) for name in columns]
        self._numbers = [
            max((len(line[at]) for line in self._cells), default=0) if right or name in TIMES else 0
            for at, (name, right) in enumerate(zip(columns, self._right, strict=True))
        ]
        """Width of the numbers and times in each column."""
        self._widths = [
            max([len(name), *(len(line[at]) for line in self._cells)]) for at, name in enumerate(columns)
        ]

    def least(self, text: int) -> int:
        """Width of the table if its strings are cut to `text` characters."""
        return sum(self._floors(text)) + 2 * (len(self._widths) - 1)

    def _floors(self, text: int) -> list[int]:
        return [min(width, max(text, n)) for width, n in zip(self._widths, self._numbers, strict=True)]

    def fit(self, room: int) -> None:
        """Fit the table to a width by cutting strings, those of the widest column first."""
        floors = self._floors(_NARROWEST)
        while sum(self._widths) + 2 * (len(self._widths) - 1) > room:
            wider = [at for at, width in enumerate(self._widths) if width > floors[at]]
            if not wider:
                break
            self._widths[max(wider, key=self._widths.__getitem__)] -= 1

    def lines(self) -> Iterator[str]:
        for line in [self._columns, *self._cells]:
            cut = [_cut(text, width) for text, width in zip(line, self._widths, strict=True)]
            yield "  ".join(
                text.rjust(width) if right else text.ljust(width)
                for text, width, right in zip(cut, self._widths, self._right, strict=True)
            )


def _room() -> int | None:
    """Return the width of the terminal in characters; None for no limit."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS"):
        return shutil.get_terminal_size().columns
    return None


def _cut(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    head = width // 2
    return f"{text[:head]}…{text[head + 1 - width :]}"


def _is_number_column(name: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    values = [row.get(name) for row in rows if row.get(name) is not None]
    return name not in TIMES and bool(values) and all(isinstance(value, int | float) for value in values)


def note(problems: Iterable[str]) -> None:
    """Print the faults of journals to stderr."""
    for problem in problems:
        say(f"note: {in_line(redacted(problem))}", err=True)


def status_of(run: Mapping[str, Any]) -> str:
    """Return the status of a run, with the step of its divergence if it has diverged."""
    diverged = run.get("diverged")
    return str(run["status"]) if diverged is None else f"{run['status']}, diverged at {diverged}"
