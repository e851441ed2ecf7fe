"""Output of a run: a live line in a terminal, plain lines elsewhere, and a log file of all lines."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import ClassVar

from everstep import hazard
from everstep.arguments import number
from everstep.contracts.services import Boundary, Moment, RunView, Service
from everstep.durable import require_no_link
from everstep.errors import ConfigError
from everstep.metrics import MetricFormatter
from everstep.metrics.collector import all_stats, is_wall
from everstep.metrics.formatting import (
    counter,
    humanize_duration,
    is_rate,
    log_line,
    log_tag,
    loss_first,
)
from everstep.metrics.statistics import Stats
from everstep.schedule import Every, Schedule
from everstep.services.best import Best
from everstep.services.live_line import (
    LiveLine,
    NotebookLine,
    Part,
    discard_output,
    fitted,
    layout,
    live_line,
    progress_bar,
    write,
)

Print = Callable[[str], None]


class Console(Service):
    """Show progress and print lines; every printed line also goes to `logs/run.log`, with the time.

    In a terminal or a notebook a live line shows epoch, step, a bar, speed, ETA and the latest metrics;
    printed lines, also the user's own, scroll past it.  Elsewhere (a file, a pipe, CI, SLURM) a progress line
    is printed now and then; its means have a window of their own, "since step N".  A terminal that goes
    away, a broken pipe or a full disk costs output, never the run.

    Args:
        every: how often the live line is redrawn and its metrics are read; default each second.
        sink: takes every line instead of standard output (`logger.info`, say); then there is no live line.
        plain_seconds: seconds between two progress lines where there is no live line.
    """

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
        self._plain_seconds = number("plain_seconds", plain_seconds)
        self._sink = sink
        self._lock = threading.RLock()
        self._run: RunView
        """Set while the loop is open."""
        self._log: LogFile | None = None
        self._line: LiveLine | NotebookLine | None = None
        self._samples: deque[tuple[float, int]] = deque(maxlen=20)
        """Times and steps of the last calls of `run`, for the speed."""
        self._latest: dict[str, Stats] = {}
        self._best: dict[str, float] = {}
        self._next_plain = 0.0
        self._since = 0
        """Step after which the window of the next progress line begins."""
        self._complained = False

    def open(self, run: RunView) -> None:
        self._run, self._since = run, run.step
        self._next_plain = run.clock() + self._plain_seconds
        self._log = LogFile(Path(run.run_dir) / "logs" / "run.log", self._emit)
        if self._sink is None:
            self._line = live_line(self._lock, self.live_line)
        if self._line is not None:
            self._line.open()

    def run(self, boundary: Boundary) -> None:
        now = self._run.clock()
        if not self._samples or boundary.step > self._samples[-1][1]:
            self._samples.append((now, boundary.step))
        if self._line is None and now < self._next_plain:
            return
        stats = all_stats(boundary.readings)
        boundary.readings.clear()
        if self._line is None:
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
            return
        line = self._line
        stream = sys.stdout if line is None else line.stream

        def output() -> None:
            fitting = fitted(text, stream) if shorten else text
            if line is None:
                write(stream, fitting + "\n")
            else:
                line.print(fitting)

        if stream is not None:  # None where a program has no standard output
            self._guarded(output)

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

    def _plain_line(self, stats: dict[str, Stats]) -> str:
        run = self._run
        tag = log_tag(run.epoch, run.max_epoch, run.step, run.max_step, None)
        best = [name for name in stats if self._best.get(name) == stats[name].last]
        window = f"since step {self._since}: {log_line('', stats, best)}" if stats else ""
        times = log_line("", {}, eta=run.get_eta())
        return " ".join(filter(None, (tag, "; ".join(filter(None, (window, self._speed(), times))))))

    def live_line(self, columns: int) -> str:
        """Return the line to draw, of at most `columns` cells."""
        run = self._run
        parts = [] if run.max_epoch == 1 else [Part(2, counter("Epoch", run.epoch, run.max_epoch))]
        parts.append(Part(0, counter("Step", run.step, run.max_step)))
        if (progress := run.get_progress()) is not None:
            parts.append(Part(3, progress_bar(progress)))
        if speed := self._speed():
            parts.append(Part(4, speed))
        if (eta := run.get_eta()) is not None:
            parts.append(Part(1, f"ETA {humanize_duration(round(eta) if eta >= 10 else round(eta, 1))}"))
        for rank, name in enumerate(sorted(self._latest, key=loss_first), start=5):
            stats = self._latest[name]
            value = stats.last if is_rate(name) else stats.mean
            text = humanize_duration(value) if is_wall(name) else f"{value:.4g}"
            mark = " (*)" if self._best.get(name) == stats.last else ""
            parts.append(Part(rank, f"{name.replace('_', ' ')} {text}{mark}"))
        return layout(parts, columns)

    def _speed(self) -> str:
        """Format the speed, as "98.3 steps/s" or "12.5 s/step"; empty while unknown."""
        if len(self._samples) < 2:
            return ""
        (start, first), (end, last) = self._samples[0], self._samples[-1]
        if end <= start:
            return ""
        rate = (last - first) / (end - start)
        value, unit = (rate, "steps/s") if rate >= 1 else (1 / rate, "s/step")
        return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


class LogFile:
    """Lines with a time stamp, each appended by one write: whole after a kill; a later start appends more.

    Args:
        path: the file, which is made with its folder.
        complain: called once if the file cannot be written; later lines try again.
    """

    def __init__(self, path: Path, complain: Print) -> None:
        self._path, self._complain = path, complain
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
                # O_NONBLOCK: a pipe in the file's place keeps nobody waiting
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
                self._file = os.open(self._path, flags, 0o666)
            os.write(self._file, lines.encode("utf-8", "backslashreplace"))
        except OSError as error:
            if not self._complained:
                self._complained = True
                self._complain(f"the log {self._path} cannot be written ({error}); lines are missing there")

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class EpochLine(Service):
    """Print the means of an epoch's steps and the results of its evaluations; at first, the baseline.

    `TrainLoop.print_logs` is called in the epoch's tail, before the services evaluate; this service runs
    after them.

    Attributes:
        bests: services whose new best values are marked ` (*)`.
        printed: called with the statistics on the line.
    """

    isolate = False
    moments = frozenset({Moment.BEFORE_EPOCH, Moment.AFTER_EPOCH})
    default_schedule = Every(epochs=1)

    def __init__(self) -> None:
        super().__init__("epoch line")
        self.bests: Sequence[Best] = ()
        self.printed: Callable[[Mapping[str, Stats]], object] = lambda stats: None

    def open(self, run: RunView) -> None:
        self._run = run

    def run(self, boundary: Boundary) -> None:
        if boundary.moment is Moment.BEFORE_EPOCH and boundary.step:
            return  # a baseline comes before step 1 only; a resumed epoch keeps its window
        readings, run = boundary.readings, self._run
        stats = all_stats(readings)
        new = {best.metric for best in self.bests if best.is_on_line(readings)}
        readings.clear()
        if stats:
            tag = log_tag(run.epoch, run.max_epoch, run.step, run.max_step, None)
            run.println(log_line(tag, stats, new, eta=run.get_eta()), shorten=True)
            self.printed(stats)

    def finish(self, boundary: Boundary) -> None:
        self.run(boundary)


def chosen_metrics(service: str, metrics: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Check names or patterns; return all of them, and those that are names."""
    if isinstance(metrics, str):
        raise ConfigError(f"{service}(metrics={metrics!r}): give a list of names, [{metrics!r}]")
    return tuple(metrics), tuple(metric for metric in metrics if not set("*?[") & set(metric))


class LogVariables(Service):
    """Print a line with the metrics collected since the last line; at the end, with the remaining metrics.

    The service has a separate window: it takes nothing from `print_logs()`, nor from another `LogVariables`.

    Args:
        metrics: names or patterns.
        every: when to print; default `Every(epochs=1)`.
        formatter: format of the metrics.
    """

    isolate = False
    default_schedule = Every(epochs=1)

    def __init__(
        self,
        metrics: Sequence[str] = ("*",),
        *,
        every: Schedule | None = None,
        formatter: MetricFormatter | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name or "log variables", every)
        self.metrics, self.watches = chosen_metrics("LogVariables", metrics)
        self.formatter = formatter or MetricFormatter()

    def open(self, run: RunView) -> None:
        self._run = run

    def run(self, boundary: Boundary) -> None:
        every = all_stats(boundary.readings)
        boundary.readings.clear()
        stats = {name: every[name] for name in every if any(fnmatchcase(name, p) for p in self.metrics)}
        if stats:
            texts = [self.formatter.format(name, stats[name], False) for name in self.formatter.sort(stats)]
            self._run.println("; ".join(texts), with_tag=True, shorten=True)

    def finish(self, boundary: Boundary) -> None:
        self.run(boundary)
