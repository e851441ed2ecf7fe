"""Output of the commands: JSON for programs, tables for people."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
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
    rows, room = list(rows), _room()
    kept = list(columns)
    cells, wide, least = _columns(rows, kept)
    if room is not None:
        room -= len(indent)
        for name in spare:
            if sum(min(w, max(_READABLE, n)) + 2 for w, n in zip(wide, least, strict=True)) - 2 > room:
                kept.remove(name)
                cells, wide, least = _columns(rows, kept)
        floors = [min(w, max(_NARROWEST, n)) for w, n in zip(wide, least, strict=True)]
        while sum(wide) + 2 * (len(wide) - 1) > room and wide != floors:
            wider = [at for at, width in enumerate(wide) if width > floors[at]]
            wide[max(wider, key=wide.__getitem__)] -= 1  # those of the widest column first
    right = [is_number_column(name, rows) for name in kept]
    for line in cells:
        cut = [_cut(text, width) for text, width in zip(line, wide, strict=True)]
        padded = [
            text.rjust(width) if is_right else text.ljust(width)
            for text, width, is_right in zip(cut, wide, right, strict=True)
        ]
        say((indent + "  ".join(padded)).rstrip())


def _columns(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str]
) -> tuple[list[list[str]], list[int], list[int]]:
    """Return the lines of a table, the widths of its columns, and those of their numbers and times."""
    cells = [[cell(name, row.get(name)) for name in columns] for row in rows]
    widths = [max((len(line[at]) for line in cells), default=0) for at in range(len(columns))]
    whole = [name in TIMES or is_number_column(name, rows) for name in columns]
    heads = [in_line(name) for name in columns]
    least = [width if is_whole else 0 for width, is_whole in zip(widths, whole, strict=True)]
    wide = [max(width, len(head)) for width, head in zip(widths, heads, strict=True)]
    return [heads, *cells], wide, least


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
