"""Sinks: services that hand the record to other programs, in files (`JSONLines`, `CSV`) or over a network.

The journal is the truth, and alone decides what the files hold.  At the start of a process a file is made
anew from the rows that are valid now, whatever a kill, a resume from an older checkpoint or a full disk has
left; from then on, new rows are appended.  A service or a database, not made anew, is a `RemoteSink`'s.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, ClassVar, TypeAlias

from everstep import hazard
from everstep.arguments import number
from everstep.checkpoint import CheckpointName, read_manifest
from everstep.contracts.metrics import Block
from everstep.contracts.services import Boundary, Moment, RunView, Service
from everstep.display.cells import with_leaves
from everstep.durable import require_no_link
from everstep.errors import ConfigError, UsageError, to_install
from everstep.record import Event, Follower, Item, Position, RunDir, RunJournal
from everstep.schedule import Every, Schedule
from everstep.services.best import matches, name_patterns

Parts: TypeAlias = Sequence[tuple[int, list[Item]]]
"""Valid part of each start of the run, this one's last: its number, and its rows and events."""


class Line(dict[str, Any]):
    """Metrics of one step, tail, epoch ...: "step", "epoch" and "phase", then name -> value.

    `time`: when the journal took them, in seconds since 1970; values of one step and name differ by 1 ms.
    """

    time = 0.0

    def tagged(self) -> dict[str, float]:
        """The metrics alone, as "loss", "epoch/loss" (means over the epoch's steps), "eval/SERVICE/loss"."""
        prefix = "" if self["phase"] in ORDER and self["phase"] != "epoch" else f"{self['phase']}/"
        return {prefix + name: value for name, value in self.items() if name not in KEYS}


KEYS = ("step", "epoch", "phase")
ORDER = {"head": 0, "step": 1, "tail": 2, "epoch": 4}
OTHER = 3


def lines(items: Iterable[Item]) -> Iterator[Line]:
    """Yield the lines of a journal's items, which must hold every row of the steps that they end with.

    Rows come by metric, so the rows of an epoch are held back until the epoch ends, or a checkpoint is
    announced or resumed from: by then the rows that belong to its state have been written.
    """
    open_lines: dict[tuple[int, int, str, int], Line] = {}
    epoch = 0

    def in_order(end: float = math.inf) -> Iterator[Line]:
        for key in sorted(key for key in open_lines if key[0] < end):
            line = open_lines.pop(key)
            ordered = Line((name, line[name]) for name in (*KEYS, *sorted(line.keys() - set(KEYS))))
            ordered.time = line.time
            yield ordered

    for item in items:
        if isinstance(item, Event):
            # announced, or gone on from without an announcement
            resumed_from = item.data["facts"].get("resumed_from") if item.kind == "segment" else None
            checkpoint = item.data["name"] if item.kind == "checkpoint" else resumed_from
            if checkpoint is not None:
                name = CheckpointName.parse(checkpoint)
                # one of an epoch's end comes after all rows of its step but those of the run's end
                yield from in_order(name.step + (name.epoch is not None))
            continue
        block = item.block
        if block.epoch != epoch:
            yield from in_order()
        epoch, phase, column = block.epoch, block.phase, _column(block.name)
        time = round(item.time, 3)
        for step, seq, value in zip(block.steps, block.seqs, block.values, strict=True):
            key = (step, ORDER.get(phase, OTHER), phase, seq)
            line = open_lines.setdefault(key, Line(step=step, epoch=epoch, phase=phase))
            line[column] = value
            line.time = max(line.time, time + seq / 1000)
    yield from in_order()


def divide_at_last_step(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """Divide items into those of complete steps, and those of the last step, of which others may follow."""
    ends = [None if isinstance(item, Event) else item.end for item in items]
    last = max((end for end in ends if end is not None), default=None)
    complete, held = list[Item](), list[Item]()
    for item, end in zip(items, ends, strict=True):
        if isinstance(item, Event):
            # in its place: it may announce that the rows before it are all
            (held if held else complete).append(item)
        elif end == last:
            earlier, of_last = item.divide_at_last_step()
            complete += earlier
            held.append(of_last)
        else:
            complete.append(item)
    return complete, held


def _column(name: str) -> str:
    return f"metric/{name}" if name in KEYS else name


def require_package(service: str, package: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(f"{service}() needs the package {package}: {to_install(package)}")


def json_leaf(value: Any) -> Any:
    """Convert NaN and infinities, which JSON lacks, to None and strings."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else str(value)


class Sink(Service, ABC):
    """Follow the journal and write its content to a file.  Subclass it, and give `write`.

    At each start the file is made anew from the whole journal, beside the old file, and takes its place
    when it is whole; then new rows are added.  So `write` writes to the file that it is given, and never
    opens `path`.  A database, even in a local file, and a service on the network are for a `RemoteSink`.

    Args:
        path: the file or folder, in `logs/` of the run directory.
        every: when to write; default every 1,000 steps, epoch and 30 seconds, and at the end in any case.
    """

    window = "none"
    default_schedule = Every(steps=1000) | Every(epochs=1) | Every(seconds=30)
    binary: ClassVar[bool] = False
    """Whether `write` writes bytes."""
    whole_steps: ClassVar[bool] = True
    """Whether the rows of the last step are held back until those of a later one come, or the loop ends: so
    the order of lines does not depend on when they were written, and where a start began."""

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
        self._file: IO[Any] | None = None
        self._follower: Follower | None = None
        self._held, self._is_over = list[Item](), False

    @property
    def path(self) -> Path:
        """Place of the file, or of the folder with the file, while the loop is open."""
        return self._run.run_dir / self._place

    lines = staticmethod(lines)
    """Lines of a journal's items: a dictionary for each step, tail or epoch, with its metrics by name."""

    @abstractmethod
    def write(self, file: IO[Any], items: Iterable[Item]) -> None:
        """Add rows and events to the file; `self.lines(items)` has the rows as dictionaries."""

    def head(self, file: IO[Any]) -> None:
        """Write the heading of a new file, if any."""

    def foot(self, file: IO[Any]) -> None:
        """Write what stands after the last row until the next start makes the file anew, if anything."""

    def needs_new_file(self, items: Iterable[Item]) -> bool:
        """Note what the heading needs for these items; return whether the file has to be made anew for it."""
        return False

    def begin(self, parts: Parts) -> None:
        """Make the file with all rows, whichever start wrote them."""
        items = self._complete([item for _, items in parts for item in items])
        self.needs_new_file(items)
        self.make(self.path, items)

    def make(self, path: Path, items: Iterable[Item]) -> None:
        """Put a file with these items in the place of the old file, whole or not at all; it stays open."""
        self._release()
        require_no_link(path, self._run.run_dir)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{self._place.name}.tmp")
        beside.unlink(missing_ok=True)  # a link with this name would lead the rows to another file
        hazard.reach("sink.create")
        raw: Any = open(beside, "wb")  # noqa: SIM115
        self._file = raw if self.binary else io.TextIOWrapper(raw, "utf-8", "replace", "")
        self.head(self._file)
        self._add(items)
        hazard.reach("sink.rename")
        os.replace(beside, path)

    def open(self, run: RunView) -> None:
        self._run, self._follower, self._is_over = run, None, False

    def run(self, boundary: Boundary) -> None:
        self.catch_up()

    def finish(self, boundary: Boundary) -> None:
        self.catch_up()  # a service that finishes later may send the file

    def close(self) -> None:
        self._is_over = True
        try:
            self.catch_up()
            assert self._file is not None
            self.foot(self._file)
            self._file.flush()
        except UsageError:  # the program's own mistake, which each start would make
            raise
        except Exception as error:  # of `write`: a warning, as at each step
            self._run.println(
                f"warning: {self.path} is not complete ({type(error).__name__}: {error}); repair the cause "
                "and start the run again"
            )
        finally:
            self._release()

    def catch_up(self) -> None:
        """Write the journal's new rows to the file; after a failure all rows anew."""
        self._run.flush()  # first: the follower reads the journal's file
        follower, self._follower = self._follower, None
        news = [] if follower is None else self._complete([*self._held, *follower.news()])
        if follower is None or self.needs_new_file(news):
            follower = Follower(self._run.run_dir, self._run.segment)
            self.begin([*follower.older(), (self._run.segment, list(follower.news()))])
        else:
            self._add(news)
        self._follower = follower  # only now: a file that could not be written is made anew next time

    def _complete(self, items: list[Item]) -> list[Item]:
        """Return the items of complete steps; the others wait for the next call, or the loop's end."""
        if self.whole_steps and not self._is_over:
            items, self._held = divide_at_last_step(items)
        return items

    def _add(self, items: Iterable[Item]) -> None:
        assert self._file is not None
        hazard.reach("sink.write")
        changed = self._changed()
        self.write(self._file, items)
        self._file.flush()
        if not self._file.tell() and self._changed() != changed:
            raise UsageError(
                f"write() of {self.name!r} has written to {self.path}, whose rows the next start deletes: "
                "write to the file that it is given; for a database, give a RemoteSink"
            )

    def _changed(self) -> int:
        return self.path.stat().st_mtime_ns if self.path.exists() else 0

    def _release(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()


class RemoteSink(Service, ABC):
    """Hand the record to a service or a database, each value once.  Subclass it, give `position` and `send`.

    The service stores a position with the values, in one transaction, and tells it when it is asked, so a
    kill or a lost answer repeats nothing.  Values are sent when a checkpoint that covers them is committed,
    and at the end.  Where a run goes back to an older checkpoint, only values that are other than the first
    time are sent; a run that starts over sends everything.

    Each delivery calls `position`, `send` and `end` in a new thread.  What belongs to one thread, such as a
    connection of sqlite3, is opened in the method that uses it.

    Args:
        timeout: seconds that a step, or the end, waits for an answer, more than 0; None: until it comes.
            What `send` draws from a global generator after that time changes the training.

    Attributes:
        run_dir: the run's directory, while the loop is open.
        key: the run's id, for the service; a run that starts over has another one.
        run_config: the run's configuration, as the record has it.
        sent: number of lines that were sent before; a service that numbers its lines counts on from there.
    """

    moments = frozenset({Moment.AFTER_CHECKPOINT})
    window = "none"

    def __init__(self, *, timeout: float | None = None, name: str | None = None) -> None:
        super().__init__(name)
        self.timeout = number("timeout", timeout, of="seconds", none="to wait until send returns")
        self.run_dir, self.sent, self._has_finished = Path(), 0, False
        self.key, self.run_config = "", dict[str, Any]()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._follower: Follower | None = None
        self._this_start, self._sent_to = "", dict[str, int]()
        """This start, and how far each start is sent."""
        self._unsent_older, self._unsent = list[Item](), list[Item]()
        """What is to be sent, of earlier starts and of this one."""
        self._superseded = set[tuple[Any, ...]]()
        """Values that were sent and are superseded."""

    @abstractmethod
    def position(self) -> str:
        """Ask the service for the position that it has of this run; "" if it has none."""

    @abstractmethod
    def send(self, lines: list[Line], position: str) -> None:
        """Hand over lines, as of `JSONLines`, and the position that the service stores with them."""

    def end(self, status: str) -> None:
        """Tell the service that this start has "finished", "stopped" or "failed", if it was asked before."""

    def open(self, run: RunView) -> None:
        self._run, self.run_dir, self._has_finished, self._follower = run, run.run_dir, False, None

    def run(self, boundary: Boundary) -> None:
        manifest: Any = read_manifest(self.run_dir / "checkpoints" / str(boundary.payload))
        segment, offset = manifest["meta"]["journal"]
        # at the beginning it is the checkpoint of an earlier start, of whose rows all that are valid count
        self._send_until(offset if segment == self._run.segment else 0)

    def finish(self, boundary: Boundary) -> None:
        self._has_finished = True

    def close(self) -> None:
        if not self._has_finished and type(self).end is RemoteSink.end:
            return
        try:
            # what no checkpoint covers may be made again
            self._send_until(sys.maxsize if self._has_finished else None, is_last=True)
        except Exception as error:
            self._run.println(
                f"warning: {self.name!r} has not sent all values ({type(error).__name__}: {error}); start "
                "the run again to send them"
            )

    def _send_until(self, end: int | None, is_last: bool = False) -> None:
        """Send what the service lacks, of this start what lies before `end` in its journal; None: nothing."""
        # a thread, so that the wait can end; it is waited for, as `send` may draw random numbers
        is_late = self._thread is not None and self._thread.is_alive()
        if is_late and not is_last:
            return  # a warning was given when the wait ended
        if not is_late:
            self._run.flush()
            self._error = None
            self._thread = threading.Thread(
                target=self._try, args=(end, is_last), name="everstep-sink", daemon=True
            )
            self._thread.start()
            self._thread.join(self.timeout)
        if self._thread is not None and self._thread.is_alive():
            self._error = TimeoutError("still no answer" if is_late else f"no answer in {self.timeout:g} s")
        if self._error is not None:
            self._error.add_note("nothing is lost: the next checkpoint or start sends these values")
            raise self._error

    def _try(self, end: int | None, is_last: bool) -> None:
        try:
            if end is not None:
                self._deliver(end)
            if is_last and self._follower is not None:
                self.end(last_status(self.run_dir))
        except BaseException as error:
            # whether the service has these values is not known: the next time asks
            self._error, self._follower = error, None

    def _deliver(self, end: int) -> None:
        if self._follower is None:
            self._load_position()
            self._follower = Follower(self.run_dir, self._run.segment)
        sent_to = self._sent_to.get(self._this_start, 0)
        self._unsent += [item for item in self._follower.news() if item.offset >= sent_to]
        items = [item for item in self._unsent if item.offset < end]
        unsent = [self._without_sent(line) for line in lines([*self._unsent_older, *items])]
        if items:
            self._sent_to[self._this_start] = items[-1].offset + 1
        if unsent := [line for line in unsent if line.keys() - set(KEYS)]:
            hazard.reach("sink.send")
            starts = {start: offset for start, offset in self._sent_to.items() if offset}
            self.send(unsent, json.dumps({"lines": self.sent + len(unsent), "starts": starts}))
            hazard.reach("sink.sent")
            self.sent += len(unsent)
        self._unsent_older, self._unsent = [], self._unsent[len(items) :]

    def _load_position(self) -> None:
        journal = RunJournal(self.run_dir)
        valid = dict(journal.parts(Position(self._run.segment, 0)))
        self.key, self.run_config, _, root = describe_root(journal, min(valid))
        text = self.position()
        try:
            stored: Any = json.loads(text) if text else {"lines": 0, "starts": {}}
            self.sent, starts = stored["lines"], stored["starts"]
        except (TypeError, ValueError, LookupError) as error:
            raise ConfigError(
                f"{self.name!r}: position() returned {text!r}; return the one that send() was given last"
            ) from error
        self._unsent_older, self._unsent, self._sent_to, self._superseded = [], [], {}, set()
        for segment in journal.segments():
            if segment.number < root:
                continue  # before the run started over
            # numbers come again where a run is restored from a mirror, the time of a start does not
            times = [event.time for event in segment.events if event.kind == "segment"]
            start = f"{segment.number} {times[:1]}"
            end, items = starts.get(start, 0), valid.get(segment.number, [])
            self._sent_to[start] = max(end, items[-1].offset + 1 if items else 0)
            self._unsent_older += [item for item in items if item.offset >= end]
            if segment.number == self._run.segment:
                self._this_start = start
                continue
            offsets = {item.offset for item in items}
            for entry in segment.blocks:
                if entry.offset < end and entry.offset not in offsets:
                    self._superseded |= _values(entry.block)

    def _without_sent(self, line: Line) -> Line:
        place = (line["epoch"], line["phase"], line["step"])
        for name in line.keys() - set(KEYS):
            if not self._superseded.isdisjoint({(*place, name, line[name].hex()), (*place, name, "")}):
                del line[name]
        return line


def describe_root(journal: RunJournal, first: int) -> tuple[str, dict[str, Any], float, int]:
    """Return what another program is told of a run: its id there, its config, the time of its beginning.

    The last value is the start by whose `resume=False` the run started over last, 1 if it never did.
    `first`, the first start whose rows are valid, may have begun anew unasked, as nothing was saved yet.
    """
    run, config = RunDir.open(journal.run_dir, create=False), journal.facts().get("config") or {}
    starts = [event for event in journal.events("segment", valid=False) if event.segment <= first]
    root = max((event.segment for event in starts if event.data["facts"].get("starts_over")), default=1)
    return f"{run.id}{'' if root == 1 else f'-{root}'}", config, run.facts["created"], root


def last_status(run_dir: Path) -> str:
    """How the newest start that has closed its loop did so: "finished", "stopped" or "failed"."""
    events = [*RunJournal(run_dir).events("closed", valid=False)]
    return str(events[-1].data["status"]) if events else "failed"


def _values(block: Block) -> set[tuple[Any, ...]]:
    """Return the values of a block by their places; one that depends on the clock counts as any value."""
    return {
        (block.epoch, block.phase, step, _column(block.name), "" if block.wall else value.hex())
        for step, value in zip(block.steps, block.values, strict=True)
    }


class JSONLines(Sink):
    """Write the record as JSON, one object per line: `pandas.read_json(path, lines=True)`.

    A line has "step", "epoch" and "phase" ("head", "step", "tail", "epoch" for the means over the
    epoch's steps, "eval/SERVICE"), and the metrics collected there by name.  NaN is null, infinities
    are "inf" and "-inf"; a metric called "step", "epoch" or "phase" is "metric/step" ...

    Args:
        path: the file, in `logs/` of the run directory.
        every: when to append new rows; default as for `Sink`.
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
        file.writelines(f"{json.dumps(with_leaves(line, json_leaf))}\n" for line in lines(items))


class CSV(Sink):
    """Write the record as a table with one header: `pandas.read_csv(path)`.

    Lines and names are as in `JSONLines`; a missing value is empty.  A metric that appears later gets a
    column at the end.

    Args:
        path, every: as in `JSONLines`.
        metrics: names or patterns of the metrics to write; lines without any of them are left out.
        delimiter: character between two columns.
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
        self.metrics, self.watches = name_patterns("CSV", metrics)
        if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n':
            raise ConfigError(f"CSV(delimiter={delimiter!r}): give one character, as ',' or a tab")
        self._delimiter = delimiter
        self._columns: list[str] = []

    def open(self, run: RunView) -> None:
        super().open(run)
        self._columns = list(KEYS)

    def needs_new_file(self, items: Iterable[Item]) -> bool:
        """Add columns for new metrics; return whether there are any."""
        blocks = [item.block for item in items if not isinstance(item, Event)]
        names = [
            (block.epoch, min(block.steps), ORDER.get(block.phase, OTHER), _column(block.name))
            for block in blocks
            if matches(block.name, self.metrics)
        ]
        new = dict.fromkeys(name for *_, name in sorted(names) if name not in self._columns)
        self._columns += new
        return bool(new)

    def head(self, file: IO[str]) -> None:
        self._table(file).writeheader()

    def write(self, file: IO[str], items: Iterable[Item]) -> None:
        metrics = set(self._columns) - set(KEYS)
        self._table(file).writerows(line for line in lines(items) if not metrics.isdisjoint(line))

    def _table(self, file: IO[str]) -> csv.DictWriter[str]:
        return csv.DictWriter(
            file, self._columns, "", "ignore", lineterminator="\n", delimiter=self._delimiter
        )
