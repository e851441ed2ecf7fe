"""Tables of the record for other programs: `JSONLines` and `CSV`."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

from everstep.arguments import checked_keywords
from everstep.errors import ConfigError
from everstep.record import Event, Item
from everstep.schedule import Schedule
from everstep.services.log_variables import chosen_metrics
from everstep.services.record_lines import KEYS, ORDER, OTHER, Line, column_name, lines
from everstep.services.sink import Parts, Sink


class JSONLines(Sink):
    """Write the record as JSON, one object per line: `pandas.read_json(path, lines=True)`.

    A line has "step", "epoch" and "phase" ("head", "step", "tail", "epoch" for the means over the
    epoch's steps, "eval/SERVICE"), and the metrics collected there by name.  NaN is null, infinities
    are "inf" and "-inf".  A metric that is itself called "step", "epoch" or "phase" is written as
    "metric/step" ...

    Once the run has ended, each value is in the file exactly once, however often the run was killed.

    Args:
        path: the file, inside the run directory.
        every: when to append new rows; default as often as the journal itself, and at the end.
    """

    def __init__(
        self,
        path: str | Path = "logs/metrics.jsonl",
        *,
        every: Schedule | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(path, every=every, name=name)

    def write(self, file: IO[str], items: Iterable[Item]) -> None:
        file.writelines(f"{_json_object(line)}\n" for line in lines(items))


class CSV(Sink):
    """Write the record as a table with one header: `pandas.read_csv(path)`.

    Lines and names are as in `JSONLines`; a missing value is empty.  A metric that appears later gets a
    column at the end: the file is made anew with this column.

    Args:
        path: the file, inside the run directory.
        metrics: names or patterns of the metrics to write; lines without any of them are left out.
        delimiter: character between two columns.
        every: when to append new rows; default as often as the journal itself, and at the end.

    Raises:
        ConfigError: `metrics` is a string, or `delimiter` is not a single character that can separate
            columns.
    """

    @checked_keywords
    def __init__(
        self,
        path: str | Path = "logs/metrics.csv",
        *,
        metrics: Sequence[str] = ("*",),
        delimiter: str = ",",
        every: Schedule | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(path, every=every, name=name)
        self.metrics, self.watches = chosen_metrics("CSV", metrics)
        if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n':
            raise ConfigError(f"CSV(delimiter={delimiter!r}): give one character, as ',' or a tab")
        self._delimiter = delimiter
        self._columns: list[str] = []

    def begin(self, older: Parts) -> None:
        parts = list(older)
        self._columns = list(KEYS)
        for _, items in parts:
            self._widen(items)
        super().begin(iter(parts))

    def add(self, news: Iterable[Item]) -> None:
        items = list(news)
        if not self._widen(items):
            super().add(items)
            return
        with self.new_file() as file:
            self._put(file, self._written())
            self.write(file, items)

    def _widen(self, items: Iterable[Item]) -> bool:
        """Add columns for new metrics; return whether there are any."""
        blocks = (
            item.block for item in items if not isinstance(item, Event) and self._takes(item.block.name)
        )
        rows = ((b.epoch, min(b.steps), ORDER.get(b.phase, OTHER), column_name(b.name)) for b in blocks)
        new = dict.fromkeys(name for *_, name in sorted(rows) if name not in self._columns)
        self._columns += new
        return bool(new)

    def _takes(self, metric: str) -> bool:
        return any(fnmatchcase(metric, pattern) for pattern in self.metrics)

    def _written(self) -> Iterator[Line]:
        with open(self.path, encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file, delimiter=self._delimiter)

    def head(self, file: IO[str]) -> None:
        csv.writer(file, lineterminator="\n", delimiter=self._delimiter).writerow(self._columns)

    def write(self, file: IO[str], items: Iterable[Item]) -> None:
        self._put(file, lines(items))

    def _put(self, file: IO[str], content: Iterable[Line]) -> None:
        table = csv.DictWriter(
            file, self._columns, "", "ignore", lineterminator="\n", delimiter=self._delimiter
        )
        metrics = set(self._columns) - set(KEYS)
        table.writerows(line for line in content if not metrics.isdisjoint(line))


def _json_object(line: Line) -> str:
    try:
        return json.dumps(line, allow_nan=False)
    except ValueError:  # JSON has neither NaN nor infinities
        return json.dumps({name: _finite(value) for name, value in line.items()})


def _finite(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else str(value)
