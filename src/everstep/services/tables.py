"""Tables of the record for other programs: `JSONLines` and `CSV`."""

from __future__ import annotations

import csv
import json
import math
import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import IO, Any, TypeAlias

from everstep import hazard
from everstep.arguments import checked_keywords
from everstep.errors import ConfigError
from everstep.record import Event, Item
from everstep.schedule import Schedule
from everstep.services.log_variables import chosen_metrics
from everstep.services.sink import Parts, Sink

Line: TypeAlias = dict[str, Any]
"""Metrics of one step, tail, epoch ...: "step", "epoch" and "phase", then name -> value."""

_KEYS = ("step", "epoch", "phase")
_ORDER = {"head": 0, "step": 1, "tail": 2, "epoch": 4}
_OTHER = 3


class _TableSink(Sink):
    """File of lines; each start of a process makes it anew from the whole journal."""

    _file: IO[str] | None

    def _begin(self, older: Parts) -> None:
        self._make(line for _, items in older for line in lines(items))

    def _make(self, content: Iterable[Line]) -> None:
        """Make a new file in the place of the old file, whole or not at all."""
        self._release()
        beside = self.path.with_name(f".{self.path.name}.tmp")
        beside.unlink(missing_ok=True)  # a link with this name would lead the rows to another file
        hazard.reach("sink.create")
        self._file = open(beside, "w", encoding="utf-8", errors="replace", newline="")  # noqa: SIM115
        self._head(self._file)
        self._write(content)
        hazard.reach("sink.rename")
        os.replace(beside, self.path)

    def _add(self, news: Iterable[Item]) -> None:
        self._write(lines(news))

    def _write(self, content: Iterable[Line]) -> None:
        assert self._file is not None
        hazard.reach("sink.write")
        self._put(self._file, content)
        self._file.flush()

    def _head(self, file: IO[str]) -> None:
        """Write the heading of the file, if any."""

    @abstractmethod
    def _put(self, file: IO[str], content: Iterable[Line]) -> None:
        """Write lines."""


class JSONLines(_TableSink):
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
        super().__init__(path, every, name)

    def _put(self, file: IO[str], content: Iterable[Line]) -> None:
        file.writelines(f"{_json_object(line)}\n" for line in content)


class CSV(_TableSink):
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
        super().__init__(path, every, name)
        self.metrics, self.watches = chosen_metrics("CSV", metrics)
        if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n':
            raise ConfigError(f"CSV(delimiter={delimiter!r}): give one character, as ',' or a tab")
        self._delimiter = delimiter
        self._columns: list[str] = []

    def _begin(self, older: Parts) -> None:
        parts = list(older)
        self._columns = list(_KEYS)
        for _, items in parts:
            self._widen(items)
        super()._begin(iter(parts))

    def _add(self, news: Iterable[Item]) -> None:
        items = list(news)
        if self._widen(items):
            self._make(chain(self._written(), lines(items)))
        else:
            self._write(lines(items))

    def _widen(self, items: Iterable[Item]) -> bool:
        """Add columns for new metrics; return whether there are any."""
        blocks = (
            item.block for item in items if not isinstance(item, Event) and self._takes(item.block.name)
        )
        rows = ((b.epoch, min(b.steps), _ORDER.get(b.phase, _OTHER), _column(b.name)) for b in blocks)
        new = dict.fromkeys(name for *_, name in sorted(rows) if name not in self._columns)
        self._columns += new
        return bool(new)

    def _takes(self, metric: str) -> bool:
        return any(fnmatchcase(metric, pattern) for pattern in self.metrics)

    def _written(self) -> Iterator[Line]:
        with open(self.path, encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file, delimiter=self._delimiter)

    def _head(self, file: IO[str]) -> None:
        csv.writer(file, lineterminator="\n", delimiter=self._delimiter).writerow(self._columns)

    def _put(self, file: IO[str], content: Iterable[Line]) -> None:
        table = csv.DictWriter(
            file, self._columns, "", "ignore", lineterminator="\n", delimiter=self._delimiter
        )
        metrics = set(self._columns) - set(_KEYS)
        table.writerows(line for line in content if not metrics.isdisjoint(line))


def lines(items: Iterable[Item]) -> Iterator[Line]:
    """Yield the lines of a journal's items, which must hold every row of the steps that they end with.

    Rows come by metric, so the rows of an epoch are held back until the epoch ends, or a checkpoint is
    announced: by then the rows of all completed steps have been written.
    """
    open_lines: dict[tuple[int, int, str, int], Line] = {}
    epoch = 0
    for item in items:
        if isinstance(item, Event):
            if item.kind == "checkpoint":
                yield from _in_order(open_lines)
            continue
        block = item.block
        if block.epoch != epoch:
            yield from _in_order(open_lines)
        epoch, phase, column = block.epoch, block.phase, _column(block.name)
        rank = _ORDER.get(phase, _OTHER)
        for step, seq, value in zip(block.steps, block.seqs, block.values, strict=True):
            key = (step, rank, phase, seq)
            line = open_lines.get(key)
            if line is None:
                line = open_lines[key] = {"step": step, "epoch": epoch, "phase": phase}
            line[column] = value
    yield from _in_order(open_lines)


def _in_order(open_lines: dict[tuple[int, int, str, int], Line]) -> Iterator[Line]:
    """Yield and remove the lines in the order of the run, whenever the journal was written."""
    for key in sorted(open_lines):
        line = open_lines.pop(key)
        names = sorted(line.keys() - set(_KEYS))
        yield {name: line[name] for name in (*_KEYS, *names)}


def _column(name: str) -> str:
    return f"metric/{name}" if name in _KEYS else name


def _json_object(line: Line) -> str:
    try:
        return json.dumps(line, allow_nan=False)
    except ValueError:  # JSON has neither NaN nor infinities
        return json.dumps({name: _finite(value) for name, value in line.items()})


def _finite(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else str(value)
