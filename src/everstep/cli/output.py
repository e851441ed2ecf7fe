"""Output of the commands: JSON for programs, tables for people."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import click

from everstep.display.cells import TIMES, cell, in_line, is_number_column, shown

_NARROWEST, _READABLE = 8, 20
"""Characters that a string keeps at least, and should keep, in a table that is too wide."""


def say(text: str = "", *, err: bool = False) -> None:
    """Print lines for people."""
    click.echo(shown(text), err=err)


def print_json(value: Any) -> None:
    """Print strict JSON: "nan", "inf" and "-inf" are strings, which every language can read back."""
    import json

    from everstep.display.cells import with_leaves

    click.echo(json.dumps(with_leaves(value, _strict), indent=1))


def _strict(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


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
        self._right = [is_number_column(name, rows) for name in columns]
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
        import shutil

        return shutil.get_terminal_size().columns
    return None


def _cut(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    head = width // 2
    return f"{text[:head]}…{text[head + 1 - width :]}"


def note(problems: Iterable[str]) -> None:
    """Print the faults of journals to stderr."""
    from everstep.redaction import redacted

    for problem in problems:
        say(f"note: {in_line(redacted(problem))}", err=True)


def status_of(run: Mapping[str, Any]) -> str:
    """Return the status of a run, with the step of its divergence if it has diverged."""
    diverged = run.get("diverged")
    return str(run["status"]) if diverged is None else f"{run['status']}, diverged at {diverged}"
