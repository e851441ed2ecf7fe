"""Output of the commands: JSON for programs, tables for people."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from everstep.display.cells import TIMES, cell, in_line, is_number_column, shown

_NARROWEST = 8
"""Characters that a string keeps at least in a table that is too wide."""


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


def print_table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], indent: str = "") -> None:
    """Print rows in columns: numbers to the right, strings to the left.

    In a terminal, or if COLUMNS gives a width, long strings of a table that is too wide lose their middle;
    numbers and times stay whole.  In a pipe nothing is cut.
    """
    rows, room = list(rows), _room()
    cells = [[cell(name, row.get(name)) for name in columns] for row in rows]
    lines = [[in_line(name) for name in columns], *cells]
    wide = [max(map(len, texts)) for texts in zip(*lines, strict=True)]
    right = [is_number_column(name, rows) for name in columns]
    if room is not None:
        floors = [
            max([len(line[at]) for line in cells if is_right or columns[at] in TIMES], default=_NARROWEST)
            for at, is_right in enumerate(right)
        ]
        floors = list(map(min, floors, wide))
        while len(indent) + sum(wide) + 2 * (len(wide) - 1) > room and wide != floors:
            wider = [at for at, width in enumerate(wide) if width > floors[at]]
            wide[max(wider, key=wide.__getitem__)] -= 1  # those of the widest column first
    for line in lines:
        cut = [_cut(text, width) for text, width in zip(line, wide, strict=True)]
        padded = [
            text.rjust(width) if is_right else text.ljust(width)
            for text, width, is_right in zip(cut, wide, right, strict=True)
        ]
        say((indent + "  ".join(padded)).rstrip())


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
