"""Screen output of a run: one live line in a terminal, plain lines elsewhere, and a log file of all lines."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from everstep import hazard
from everstep.arguments import number
from everstep.contracts.services import Boundary, RunView, Service, Stage
from everstep.durable import require_no_link
from everstep.metrics.collector import all_stats, is_wall
from everstep.metrics.formatting import humanize_duration, log_line, log_tag, loss_first
from everstep.metrics.statistics import Stats
from everstep.schedule import Every, Schedule
from everstep.services.live_line import (
    BOLD,
    DIM,
    GREEN,
    Above,
    LiveLine,
    Part,
    discard_output,
    fitted,
    is_live_terminal,
    layout,
    progress_bar,
    write,
)
from everstep.services.notebook_line import NotebookLine, is_notebook

Print = Callable[[str], None]


class Console(Service):
    """Show progress and print lines; every printed line also goes to `logs/run.log`, with the time.

    In a terminal a live line shows epoch, step, a bar, steps per second, ETA and the latest metrics;
    printed lines, also from the user's own `print`, scroll above it.  In a notebook the live line is an
    output of the cell, and lines are printed below it.  Elsewhere (a file, a pipe, CI, SLURM) a progress
    line is printed now and then, in the middle of an epoch, too: its means
    cover a separate window, "since step N".  A terminal that goes away, a broken pipe or a full disk costs
    output, never the run.

    Args:
        every: how often the live line is redrawn and its metrics are read; default each second.
        sink: takes every line instead of standard output (`logger.info`, say); then there is no live line.
        plain_seconds: seconds between two progress lines where there is no live line.

    Raises:
        ConfigError: `plain_seconds` is not positive.
    """

    stage = Stage.REPORT
    default_schedule = Every(seconds=1)
    isolate: ClassVar[bool] = False
    window = "unsaved"

    def __init__(
        self,
        every: Schedule | None = None,
        *,
        sink: Print | None = None,
        plain_seconds: float = 30.0,
        name: str | None = None,
    ) -> None:
        super().__init__(name, every)
        self._plain_seconds: float | None = number("plain_seconds", plain_seconds)
        """Seconds between progress lines; None for no progress lines."""
        self._sink = sink
        self._lock = threading.RLock()
        self._run: RunView
        """Set while the loop is open."""
        self._log: LogFile | None = None
        self._line: LiveLine | NotebookLine | None = None
        self._speed = _Speed()
        self._latest: dict[str, Stats] = {}
        self._best: dict[str, float] = {}
        self._next_plain: float | None = None
        self._since = 0
        """Step after which the window of the next progress line begins."""
        self._complained = False

    def open(self, run: RunView) -> None:
        self._run, self._since = run, run.step
        if self._plain_seconds is not None:
            self._next_plain = run.clock() + self._plain_seconds
        self._log = LogFile(Path(run.run_dir) / "logs" / "run.log", self._emit)
        taken = isinstance(sys.stdout, Above)  # two consoles that draw would overwrite each other
        if self._sink is None and not taken:
            self._line = self._live_line()
        if self._line is not None:
            self._line.open()

    def _live_line(self) -> LiveLine | NotebookLine | None:
        if is_notebook():
            return NotebookLine(self.live_lines)
        if is_live_terminal(sys.stdout):
            return LiveLine(sys.stdout, self._lock, self.live_lines)
        return None

    def run(self, boundary: Boundary) -> None:
        now = self._run.clock()
        self._speed.update(now, boundary.step)
        if self._line is None and (self._next_plain is None or now < self._next_plain):
            return
        readings = boundary.readings
        stats = all_stats(readings)
        readings.clear()
        if self._line is None:
            assert self._plain_seconds is not None
            self._next_plain = now + self._plain_seconds
            self.print(self._plain_line(stats), shorten=True)
            self._since = boundary.step
        else:
            with self._lock:
                self._latest.update(stats)
                self._guarded(self._line.draw)

    def finish(self, boundary: Boundary) -> None:
        self.run(boundary)

    def print(self, text: str, shorten: bool = False) -> None:
        """Print `text` and a newline above the live line, and append it to the log file.

        May be called from any thread, also before `open` and after `close` (no log file then).

        Args:
            shorten: whether a terminal shows as much of the text as fits in a line; a file, a pipe, a sink
                and the log have all of it.
        """
        with self._lock:
            if self._log is not None:
                self._log.write(text)
            self._emit(text, shorten)

    def mark_best(self, name: str, value: float) -> None:
        """Mark the metric `name` as best, from now on, wherever its last value is this `value`."""
        self._best[name] = value

    def close(self) -> None:
        with self._lock:
            if self._line is not None:
                self._guarded(self._line.close)
                self._line = None
            if self._log is not None:
                self._log.close()
                self._log = None

    def _emit(self, text: str, shorten: bool = False) -> None:
        if self._sink is not None:
            self._sink(text)
        elif self._line is not None:
            line = self._line
            self._guarded(lambda: line.print(fitted(text, line.stream) if shorten else text))
        elif sys.stdout is not None:  # None where a program has no standard output
            stream = sys.stdout
            self._guarded(lambda: write(stream, (fitted(text, stream) if shorten else text) + "\n"))

    def _guarded(self, output: Callable[[], None]) -> None:
        """Run an output that may fail: say once, in the log, that output is lost; training continues."""
        try:
            output()
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            if isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.EIO):
                discard_output(sys.stdout if self._line is None else self._line.stream)
            if self._log is not None and not self._complained:
                self._complained = True
                self._log.write(f"standard output fails ({error}); lines go to this file only")

    def _is_best(self, name: str, stats: Stats) -> bool:
        return self._best.get(name) == stats.last

    def _plain_line(self, stats: dict[str, Stats]) -> str:
        run = self._run
        tag = log_tag(run.epoch, run.max_epoch, run.step, run.max_step, None)
        best = [name for name in stats if self._is_best(name, stats[name])]
        window = f"since step {self._since}: {log_line('', stats, best)}" if stats else ""
        times = log_line("", {}, eta=run.get_eta())
        return " ".join(filter(None, (tag, "; ".join(filter(None, (window, self._speed.text(), times))))))

    def live_lines(self, columns: int, color: bool) -> list[str]:
        """Return the lines to draw in a terminal, of at most `columns` cells."""
        metrics = [
            _metric(name, self._latest[name], self._is_best(name, self._latest[name]), rank)
            for rank, name in enumerate(self.names, start=5)
        ]
        return [layout(self.counters(bar=20) + metrics, columns, color)]

    def counters(self, bar: int = 0) -> list[Part]:
        """Return the run's progress, from left to right; with a bar of `bar` cells."""
        run = self._run
        parts = [] if run.max_epoch == 1 else [_counter("Epoch", run.epoch, run.max_epoch, rank=2)]
        parts.append(_counter("Step", run.step, run.max_step, rank=0))
        if bar and (progress := run.get_progress()) is not None:
            parts.append(progress_bar(progress, bar, rank=3))
        if speed := self._speed.text():
            parts.append(Part(4, ((speed, ""),)))
        if (eta := run.get_eta()) is not None:
            eta = round(eta) if eta >= 10 else round(eta, 1)
            parts.append(Part(1, (("ETA ", DIM), (humanize_duration(eta), ""))))
        return parts

    @property
    def progress(self) -> float | None:
        """Done part of the run, 0 to 1; None if the run is unbounded."""
        return self._run.get_progress()

    @property
    def names(self) -> list[str]:
        """Names of the metrics in order, times last: the line has the speed already."""
        return sorted(self._latest, key=loss_first)


def _counter(word: str, value: int, limit: int | None, rank: int) -> Part:
    of = "" if limit is None else f"/{limit}"
    return Part(rank, ((f"{word} ", DIM), (str(value), BOLD), (of, DIM)))


def _metric(name: str, stats: Stats, best: bool, rank: int) -> Part:
    return Part(rank, ((f"{label(name)} ", DIM), (shown(name, stats), ""), (" (*)" if best else "", GREEN)))


def label(name: str) -> str:
    """Format a metric's name."""
    return name.replace("_", " ")


def shown(name: str, stats: Stats) -> str:
    """Format a metric's mean."""
    return humanize_duration(stats.mean) if is_wall(name) else f"{stats.mean:.4g}"


class _Speed:
    """Speed in steps per second over the last calls of `update`."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=20)

    def update(self, now: float, step: int) -> None:
        if not self._samples or step > self._samples[-1][1]:
            self._samples.append((now, step))

    def text(self) -> str:
        """Format the speed, as "98.3 steps/s" or "12.5 s/step"; empty while unknown."""
        if len(self._samples) < 2:
            return ""
        (start, first), (end, last) = self._samples[0], self._samples[-1]
        if end <= start:
            return ""
        rate = (last - first) / (end - start)
        return f"{_three_digits(rate)} steps/s" if rate >= 1 else f"{_three_digits(1 / rate)} s/step"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


_LOG_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
"""Flags of the log file; O_NONBLOCK, so that a pipe in the file's place keeps nobody waiting."""


class LogFile:
    """Lines with a time stamp, each appended by one write: whole after a kill; a later start appends more.

    Args:
        path: the file, which is made with its folder.
        complain: called once if the file cannot be written; later lines try again.
    """

    def __init__(self, path: Path, complain: Print) -> None:
        self._path = path
        self._complain = complain
        self._complained = False
        self._file: int | None = None

    def write(self, text: str) -> None:
        stamp = datetime.now().astimezone().isoformat(timespec="seconds")
        lines = "".join(f"{stamp} {line}\n" for line in text.split("\n"))
        try:
            hazard.reach("console.log")
            if self._file is None:
                require_no_link(self._path, self._path.parent.parent)
                self._path.parent.mkdir(exist_ok=True)
                self._file = os.open(self._path, _LOG_FLAGS, 0o666)
            os.write(self._file, lines.encode("utf-8", "backslashreplace"))
        except OSError as error:
            if not self._complained:
                self._complained = True
                self._complain(f"the log {self._path} cannot be written ({error}); lines are missing there")

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
