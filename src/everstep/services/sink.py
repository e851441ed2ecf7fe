"""Sinks: services that hand the record to other programs, in files (`JSONLines`, `CSV`) or over a network.

The journal is the truth, and alone decides what the files hold.  At the start of a process a file is made
anew from the rows that are valid now, whatever a kill, a resume from an older checkpoint or a full disk has
left; from then on, new rows are appended.  What cannot be made anew is a `RemoteSink`'s.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, ClassVar, TypeAlias

from everstep import hazard
from everstep.checkpoint import read_manifest
from everstep.contracts.metrics import Block
from everstep.contracts.services import Boundary, Moment, RunView, Service
from everstep.durable import require_no_link
from everstep.errors import ConfigError
from everstep.record import Event, Follower, Item, Position, RunJournal
from everstep.schedule import Every, Schedule
from everstep.services.console import chosen_metrics

Parts = Iterable[tuple[int, list[Item]]]
"""Valid part of each earlier start of the run: its number, and its rows and events."""

Line: TypeAlias = dict[str, Any]
"""Metrics of one step, tail, epoch ...: "step", "epoch" and "phase", then name -> value."""

KEYS = ("step", "epoch", "phase")
ORDER = {"head": 0, "step": 1, "tail": 2, "epoch": 4}
OTHER = 3


def lines(items: Iterable[Item]) -> Iterator[Line]:
    """Yield the lines of a journal's items, which must hold every row of the steps that they end with.

    Rows come by metric, so the rows of an epoch are held back until the epoch ends, or a checkpoint is
    announced: by then the rows of all completed steps have been written.
    """
    open_lines: dict[tuple[int, int, str, int], Line] = {}
    epoch = 0

    def in_order() -> Iterator[Line]:
        for key in sorted(open_lines):
            line = open_lines.pop(key)
            yield {name: line[name] for name in (*KEYS, *sorted(line.keys() - set(KEYS)))}

    for item in items:
        if isinstance(item, Event):
            if item.kind == "checkpoint":
                yield from in_order()
            continue
        block = item.block
        if block.epoch != epoch:
            yield from in_order()
        epoch, phase, column = block.epoch, block.phase, _column(block.name)
        for step, seq, value in zip(block.steps, block.seqs, block.values, strict=True):
            key = (step, ORDER.get(phase, OTHER), phase, seq)
            open_lines.setdefault(key, {"step": step, "epoch": epoch, "phase": phase})[column] = value
    yield from in_order()


def _column(name: str) -> str:
    return f"metric/{name}" if name in KEYS else name


def finite(value: Any) -> Any:
    """Convert NaN and infinities, which JSON lacks, to None and strings; also inside lists and mappings."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    return [finite(part) for part in value] if isinstance(value, list) else value


class Sink(Service, ABC):
    """Follow the journal and write its content to a file.  Subclass it, and give `write`.

    For a service on the network, which cannot be made anew, there is `RemoteSink`.

    At each start the file is made anew from the whole journal, beside the old file, and takes its place
    when it is whole; then new rows are added.  A file that is deleted or changed meanwhile is made anew.

    Args:
        path: the file or folder, in `logs/` of the run directory.
        every: when to write; default as often as the journal itself, and at the end in any case.

    Raises:
        ConfigError: `path` leads elsewhere, or is a place that the run itself uses.
    """

    window = "none"
    default_schedule = Every(steps=1000) | Every(epochs=1) | Every(seconds=30)
    binary: ClassVar[bool] = False
    """Whether `write` writes bytes."""

    def __init__(self, path: str | Path, *, every: Schedule | None = None, name: str | None = None) -> None:
        super().__init__(name, every)
        self._place = Path(path)
        parts = self._place.parts
        is_free = parts[:1] == ("logs",) and len(parts) > 1 and parts[1] not in ("run.log", "media")
        if not is_free or ".." in parts:
            raise ConfigError(
                f"path={str(path)!r} of service {self.name!r} is no free place in the run's folder logs; "
                'give another path, as in "logs/mine"'
            )
        self._run: RunView
        """Set while the loop is open."""
        self._file: IO[Any] | None = None
        """File for new rows, while it is open."""
        self._follower: Follower | None = None
        self._warned = False

    @property
    def path(self) -> Path:
        """Place of the file, or of the folder with the file, while the loop is open."""
        return Path(self._run.run_dir) / self._place

    lines = staticmethod(lines)
    """Lines of a journal's items: a dictionary for each step, tail or epoch, with its metrics by name."""

    # ------------------------------------------------------------------------- what a subclass gives

    @abstractmethod
    def write(self, file: IO[Any], items: Iterable[Item]) -> None:
        """Add rows and events to the file; `self.lines(items)` has the rows as dictionaries."""

    def head(self, file: IO[Any]) -> None:
        """Write the heading of a new file, if any."""

    def begin(self, older: Parts) -> None:
        """Make the file, with the rows of the earlier starts."""
        self.make(item for _, items in older for item in items)

    def add(self, news: Iterable[Item]) -> bool | None:
        """Append new rows of this start; False if the file has to be made anew to take them."""
        assert self._file is not None
        hazard.reach("sink.write")
        self.write(self._file, news)
        self._file.flush()
        return None

    def file_path(self) -> Path:
        """Return the path of the file for new rows."""
        return self.path

    def make(self, items: Iterable[Item]) -> None:
        """Put a file with these items in the place of the old file, whole or not at all; it stays open."""
        self._release()
        path = self.file_path()
        beside = path.with_name(f".{self._place.name}.tmp")
        beside.unlink(missing_ok=True)  # a link with this name would lead the rows to another file
        hazard.reach("sink.create")
        raw: Any = open(beside, "wb")  # noqa: SIM115
        self._file = raw if self.binary else io.TextIOWrapper(raw, "utf-8", "replace", "")
        self.head(self._file)
        hazard.reach("sink.write")
        self.write(self._file, items)
        self._file.flush()
        hazard.reach("sink.rename")
        os.replace(beside, path)

    # ------------------------------------------------------------------------------ as a service

    def open(self, run: RunView) -> None:
        self._run, self._follower, self._warned = run, None, False

    def run(self, boundary: Boundary) -> None:
        self.catch_up()

    def finish(self, boundary: Boundary) -> None:
        self.catch_up()

    def close(self) -> None:
        try:
            self.catch_up()
        except OSError as error:
            self._run.println(
                f"warning: {self.path} is not complete ({error}); repair the cause and start the run again"
            )
        finally:
            self._release()

    def catch_up(self) -> None:
        """Write the journal's new rows to the file; after a failure, or damage, all rows anew."""
        self._run.flush()  # first: the follower reads the journal's file
        try:
            if self._follower is None or not self._append(self._follower):
                self._release()
                require_no_link(self.file_path(), Path(self._run.run_dir))
                self.file_path().parent.mkdir(parents=True, exist_ok=True)
                self._follower = None
                while self._follower is None:  # twice where the rows of this start need another heading
                    follower = Follower(Path(self._run.run_dir), self._run.segment)
                    self.begin(follower.older())
                    self._follower = None if self.add(follower.news()) is False else follower
        except BaseException:
            self._follower = None
            self._release()
            raise

    def _append(self, follower: Follower) -> bool:
        """Append new rows; False if the file has to be made anew."""
        # checked again after: our rows do not reach a file that was replaced by an equal file meanwhile
        if self._is_intact():
            if self.add(follower.news()) is False:
                return False
            if self._is_intact():
                return True
        if not self._warned:
            self._warned = True
            self._run.println(
                f"warning: {self.path} was deleted or changed during the run; the file is made anew from "
                "the journal"
            )
        return False

    def _is_intact(self) -> bool:
        """Whether the file is there, and has the length that it was left with."""
        try:
            return self._file is not None and self.file_path().stat().st_size == self._file.tell()
        except FileNotFoundError:
            return False

    def _release(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()


class RemoteSink(Service, ABC):
    """Hand the record to a service on the network, each value once.  Subclass it, give `position` and `send`.

    The service stores a position with the values, in one transaction, and tells it when it is asked, so a
    kill or a lost answer repeats nothing.  Values are sent when a checkpoint that covers them is committed,
    and at the end: no resume makes them again.  After an outage, which is a warning, the next checkpoint or
    the next start sends what is missing.  Where a run goes back to an older checkpoint, only values that
    are other than the first time are sent; a run that starts over sends everything.

    Attributes:
        run_dir: the run's directory, while the loop is open.
    """

    moments = frozenset({Moment.AFTER_CHECKPOINT})
    window = "none"

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(name)
        self.run_dir = Path()
        self._ended = False

    # ------------------------------------------------------------------------- what a subclass gives

    @abstractmethod
    def position(self) -> str:
        """Ask the service for the position that it has of this run; "" if it has none."""

    @abstractmethod
    def send(self, lines: list[Line], position: str) -> None:
        """Hand over lines, as of `JSONLines`, and the position that the service stores with them.

        It is called between two steps, which wait for it: give a request a time limit.
        """

    # ------------------------------------------------------------------------------ as a service

    def open(self, run: RunView) -> None:
        self._run, self.run_dir, self._ended = run, Path(run.run_dir), False

    def run(self, boundary: Boundary) -> None:
        manifest: Any = read_manifest(self.run_dir / "checkpoints" / str(boundary.payload))
        segment, offset = manifest["meta"]["journal"]
        # at the beginning it is the checkpoint of an earlier start, of whose rows all that are valid count
        self._deliver(offset if segment == self._run.segment else 0)

    def finish(self, boundary: Boundary) -> None:
        self._ended = True

    def close(self) -> None:
        if not self._ended:
            return  # what no checkpoint covers may be made again
        try:
            self._deliver(sys.maxsize)
        except Exception as error:
            self._run.println(
                f"warning: {self.name!r} has not sent all values ({type(error).__name__}: {error}); start "
                "the run again to send them"
            )

    def _deliver(self, end: int) -> None:
        """Send what the service does not have, of this start what lies before `end` in its journal."""
        self._run.flush()
        journal, text = RunJournal(self.run_dir), self.position()
        try:
            had: dict[str, int] = dict(json.loads(text)) if text else {}
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.name!r}: position() returned {text!r}; return the one that send() was given last"
            ) from error
        valid = dict(journal.parts(Position(self._run.segment, end)))
        has, news, superseded = {}, list[Item](), set[tuple[Any, ...]]()
        for segment in journal.segments():
            if segment.number < min(valid, default=sys.maxsize):
                continue  # before the run started over
            # numbers come again where a run is restored from a mirror, the time of a start does not
            start = next((repr(e.time) for e in segment.events if e.kind == "segment"), str(segment.number))
            until, items = had.get(start, 0), valid.get(segment.number, [])
            has[start] = max(until, items[-1].offset + 1 if items else 0)
            news += [item for item in items if item.offset >= until]
            offsets = {item.offset for item in items}
            for stored in segment.blocks:
                if stored.offset < until and stored.offset not in offsets:
                    superseded |= _values(stored.block)
        found = [_without(line, superseded) for line in lines(news)]
        if found := [line for line in found if line.keys() - KEYS]:
            hazard.reach("sink.send")
            self.send(found, json.dumps({start: offset for start, offset in has.items() if offset}))
            hazard.reach("sink.sent")


def _values(block: Block) -> set[tuple[Any, ...]]:
    """Return the values of a block by their places; one that depends on the clock counts as any value."""
    return {
        (block.epoch, block.phase, step, _column(block.name), "" if block.wall else value.hex())
        for step, value in zip(block.steps, block.values, strict=True)
    }


def _without(line: Line, values: set[tuple[Any, ...]]) -> Line:
    """Return a line without values that the service has."""
    place = (line["epoch"], line["phase"], line["step"])
    return {
        name: value
        for name, value in line.items()
        if name in KEYS or values.isdisjoint({(*place, name, value.hex()), (*place, name, "")})
    }


class JSONLines(Sink):
    """Write the record as JSON, one object per line: `pandas.read_json(path, lines=True)`.

    A line has "step", "epoch" and "phase" ("head", "step", "tail", "epoch" for the means over the
    epoch's steps, "eval/SERVICE"), and the metrics collected there by name.  NaN is null, infinities
    are "inf" and "-inf".  A metric that is itself called "step", "epoch" or "phase" is written as
    "metric/step" ...

    Once the run has ended, each value is in the file exactly once, however often the run was killed.

    Args:
        path: the file, in `logs/` of the run directory.
        every: when to append new rows; default as often as the journal itself, and at the end.
    """

    isolate = False  # it draws no random numbers

    def __init__(
        self,
        path: str | Path = "logs/metrics.jsonl",
        *,
        every: Schedule | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(path, every=every, name=name)

    def write(self, file: IO[str], items: Iterable[Item]) -> None:
        file.writelines(f"{json.dumps(finite(line))}\n" for line in lines(items))


class CSV(Sink):
    """Write the record as a table with one header: `pandas.read_csv(path)`.

    Lines and names are as in `JSONLines`; a missing value is empty.  A metric that appears later gets a
    column at the end: the file is made anew with this column.

    Args:
        path: the file, in `logs/` of the run directory.
        metrics: names or patterns of the metrics to write; lines without any of them are left out.
        delimiter: character between two columns.
        every: when to append new rows; default as often as the journal itself, and at the end.
    """

    isolate = False  # it draws no random numbers

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
        for _, items in parts:
            self._widen(items)
        super().begin(parts)

    def add(self, news: Iterable[Item]) -> bool | None:
        items = list(news)
        return False if self._widen(items) else super().add(items)

    def _widen(self, items: Iterable[Item]) -> bool:
        """Add columns for new metrics; return whether there are any."""
        blocks = [item.block for item in items if not isinstance(item, Event)]
        names = [
            (block.epoch, min(block.steps), ORDER.get(block.phase, OTHER), _column(block.name))
            for block in blocks
            if any(fnmatchcase(block.name, pattern) for pattern in self.metrics)
        ]
        new = dict.fromkeys(name for *_, name in sorted(names) if name not in self._columns)
        self._columns += new
        return bool(new)

    def open(self, run: RunView) -> None:
        super().open(run)
        self._columns = list(KEYS)

    def head(self, file: IO[str]) -> None:
        self._table(file).writeheader()

    def write(self, file: IO[str], items: Iterable[Item]) -> None:
        metrics = set(self._columns) - set(KEYS)
        self._table(file).writerows(line for line in lines(items) if not metrics.isdisjoint(line))

    def _table(self, file: IO[str]) -> csv.DictWriter[str]:
        return csv.DictWriter(
            file, self._columns, "", "ignore", lineterminator="\n", delimiter=self._delimiter
        )
