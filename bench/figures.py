"""Figures of a benchmark: what was measured, beside what, and what is wanted.

A program of this folder calls `program(__doc__, measure)`: its tables are printed as they are made, and with
--json FILE they are written for bench/suite.py, too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """A row of a table.

    Attributes:
        name: what was measured.
        unit: "us", "ms", "s", "MB", "bytes", or with "/s" at its end what is wanted high.
        values: one of each repeat, in the unit.
        over: values of what this is compared with, one of each repeat of theirs; empty: with nothing.
        goal: limit of the ratio where `over` is given, else of the median; None: nothing is wanted.
    """

    name: str
    unit: str
    values: Sequence[float]
    over: Sequence[float] = ()
    goal: float | None = None

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """Lower and upper quartile; the lowest and the highest of fewer than four values."""
        if len(self.values) < 4:
            return min(self.values), max(self.values)
        low, _, high = quantiles(self.values, n=4)
        return low, high

    @property
    def differences(self) -> list[float]:
        """Each value less what it is compared with: its neighbour in time, where as many were measured."""
        if len(self.over) == len(self.values):
            return [value - other for value, other in zip(self.values, self.over, strict=True)]
        return [value - median(self.over) for value in self.values] if self.over else []

    @property
    def ratio(self) -> float | None:
        """1 plus the median difference by what it is compared with."""
        return 1 + median(self.differences) / median(self.over) if self.over else None

    @property
    def reached(self) -> bool | None:
        """Whether the goal is reached; None if there is none."""
        if self.goal is None:
            return None
        found = self.median if self.ratio is None else self.ratio
        return found >= self.goal if self.unit.endswith("/s") else found <= self.goal


class Table(NamedTuple):
    """Figures that belong together.

    Attributes:
        title: what they are of.
        how: how to read them, in a sentence or two: what a value is, and what it is compared with.
        figures: the rows.
    """

    title: str
    how: str
    figures: list[Figure]


def number(value: float) -> str:
    """Three digits that count, in words a person reads."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def row(figure: Figure) -> list[str]:
    """The cells of a row, as `HEAD` names them."""
    low, high = figure.spread
    cells = [figure.name, f"{number(figure.median)} {figure.unit}".strip()]
    cells += [f"{number(low)} to {number(high)}" if len(figure.values) > 1 else "", str(len(figure.values))]
    if figure.over:
        cells += [number(median(figure.over)), f"{median(figure.differences):+.3g}", f"{figure.ratio:.3f}"]
    else:
        cells += ["", "", ""]
    if figure.goal is None:
        return [*cells, ""]
    return [*cells, f"{number(figure.goal)}: {'reached' if figure.reached else 'missed'}"]


HEAD = ["", "median", "quartiles", "n", "beside it", "difference", "ratio", "goal"]


def shown(table: Table) -> str:
    """The table for a terminal."""
    rows = [HEAD, *map(row, table.figures)]
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(HEAD))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in rows
    ]
    return "\n".join([table.title, *lines, ""])


Measure = Callable[[Any], Iterator[Table]]
"""Measures, with the options of the command line."""


def program(
    doc: str | None, measure: Measure, add_arguments: Callable[[argparse.ArgumentParser], None] | None = None
) -> None:
    """Run a benchmark from the command line.

    Args:
        doc: its description.
        measure: gives its tables, each as soon as it is measured.
        add_arguments: adds its own options to --json.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables for bench/suite.py")
    if add_arguments is not None:
        add_arguments(parser)
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a package that is installed is compiled
    tables, loads = [], [os.getloadavg()[0]]
    for table in measure(options):
        print(shown(table), flush=True)
        tables.append(table)
    loads.append(os.getloadavg()[0])
    print(f"load {loads[0]:.1f} before, {loads[1]:.1f} after, on {os.cpu_count()} cores")
    if options.json:
        options.json.write_text(json.dumps({"load": loads, "tables": [as_json(table) for table in tables]}))


def as_json(table: Table) -> dict[str, Any]:
    """The table, with values of five digits: more tell nothing."""
    rows = []
    for figure in table.figures:
        short = {
            name: [float(f"{each:.5g}") for each in getattr(figure, name)] for name in ("values", "over")
        }
        rows.append({**figure._asdict(), **short})
    return {"title": table.title, "how": table.how, "figures": rows}


def from_json(table: dict[str, Any]) -> Table:
    return Table(table["title"], table["how"], [Figure(**figure) for figure in table["figures"]])


def ask(command: Sequence[str], **environment: str) -> Any:
    """Run a program that prints JSON as its last line, in a process of its own.

    Raises:
        SystemExit: the program failed; it says how.
    """
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def resident() -> int:
    """Bytes of memory that this process has in use."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
