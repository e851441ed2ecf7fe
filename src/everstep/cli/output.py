"""What commands print: JSON for programs, tables for people."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import click

TIMES = {"created", "started", "heartbeat", "time", "last_seen"}
"""Names of values that are seconds since 1970."""


def print_json(value: Any) -> None:
    """Print strict JSON: "nan", "inf" and "-inf" as texts, which every language can read back."""
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
    """A value as a person reads it."""
    if value is None or (name == "epoch" and value == 0):  # a run without epochs, or before the first
        return "-"
    if name in TIMES and isinstance(value, int | float):
        return datetime.fromtimestamp(value).strftime("%Y-%m-%d %H:%M:%S")
    if name == "bytes" and isinstance(value, int):
        return size(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def size(count: float) -> str:
    """A number of bytes in the unit that suits it."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def print_table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], indent: str = "") -> None:
    """Print rows in columns: numbers to the right, texts to the left, nothing cut off."""
    rows = list(rows)
    cells = [[cell(name, row.get(name)) for name in columns] for row in rows]
    right = [_is_number_column(name, rows) for name in columns]
    widths = [max([len(name), *(len(line[at]) for line in cells)]) for at, name in enumerate(columns)]
    for line in [list(columns), *cells]:
        padded = [
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        ]
        click.echo((indent + "  ".join(padded)).rstrip())


def _is_number_column(name: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    values = [row.get(name) for row in rows if row.get(name) is not None]
    return name not in TIMES and bool(values) and all(isinstance(value, int | float) for value in values)


def note(problems: Iterable[str]) -> None:
    """Say what is wrong with journals, beside the answer."""
    for problem in problems:
        click.echo(f"note: {problem}", err=True)
