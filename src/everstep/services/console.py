"""Output of a run: a live line in a terminal or a notebook, plain lines elsewhere, a log file of all lines.

No thread, no cursor hidden, no terminal mode changed: a run that is killed with SIGKILL leaves the terminal
as it was.  `rich.live` reads what users print as markup, wraps long lines, and swallows prompts.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, TextIO

from everstep import hazard
from everstep.arguments import number
from everstep.contracts.services import Boundary, Moment, Readings, RunView, Service
from everstep.durable import require_no_link
from everstep.metrics import MetricFormatter
from everstep.metrics.collector import all_stats
from everstep.metrics.formatting import checked_formatter, counter, humanize_duration, log_line
from everstep.metrics.statistics import Stats
from everstep.redaction import redacted
from everstep.schedule import Every, Schedule
from everstep.services.best import Best, matches, name_patterns
from everstep.unattended import append_line

Print = Callable[[str], None]
Content = Callable[[], str]
_BAR, _CELL_COLUMNS = 20, 110
"""Cells of the bar, and characters in a line of a notebook, whose cells do not tell their width."""


class Console(Service):
    """Show progress and print lines; every printed line also goes to `logs/run.log`, with the time.

    In a terminal or a notebook a live line shows epoch, step, a bar, speed, ETA and the latest metrics;
    printed lines, also the user's own, scroll past it.  Elsewhere (a file, a pipe, CI, SLURM) the same is
    printed now and then.  A terminal that goes away, a broken pipe or a full disk never ends the run.

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
        self._log: LogFile | None = None
        self._line: LiveLine | NotebookLine | None = None
        self._latest: dict[str, Stats] = {}
        self.bests: Callable[[], Sequence[Best]] = tuple
        """Returns the services whose best values are marked."""
        self._next_plain = 0.0
        """When the next progress line is due."""
        self._complained = False

    def open(self, run: RunView) -> None:
        self._run, self._next_plain = run, run.clock() + self._plain_seconds
        self._log = LogFile(run.run_dir / "logs" / "run.log", self._emit)
        if self._sink is None:
            self._line = live_line(self._lock, self._content)

    def run(self, boundary: Boundary) -> None:
        now = self._run.clock()
        if self._line is None and now < self._next_plain:
            return
        self._latest.update(all_stats(boundary.readings))
        boundary.readings.clear()
        if self._line is None:
            self._next_plain = now + self._plain_seconds
            self.print(self._content())
        else:
            with self._lock, self._output():
                self._line.draw()

    def finish(self, boundary: Boundary) -> None:
        self.run(boundary)

    def print(self, text: str, shorten: bool = False) -> None:
        """Print a line above the live line, and append it to the log file; from any thread, at any time.

        `shorten`: a terminal shows as much as fits in a line; a file, a pipe, a sink and the log have all.
        """
        with self._lock:
            if self._log is not None:
                self._log.print(text)
            self._emit(text, shorten)

    def close(self) -> None:
        with self._lock:
            if self._line is not None:
                with self._output():
                    self._line.close()
                self._line = None
            self._log = None

    def _emit(self, text: str, shorten: bool = False) -> None:
        line = self._line
        stream = sys.stdout if line is None else line.stream
        if self._sink is not None:
            self._sink(text)
        elif stream is not None:  # None where a program has no standard output
            with self._output():
                fitting = _crop(text, _columns(stream)) if shorten and stream.isatty() else text
                if line is None:
                    _write(stream, fitting + "\n")
                else:
                    line.print(fitting)

    @contextmanager
    def _output(self) -> Iterator[None]:
        """Survive an output that fails: say once, in the log, that output is lost; training continues."""
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            if isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.EIO):
                # nobody reads it: it leads nowhere, so that no flush fails at Python's exit
                with suppress(OSError, ValueError, AttributeError), open(os.devnull, "wb") as nowhere:
                    stream = sys.stdout if self._line is None else self._line.stream
                    os.dup2(nowhere.fileno(), stream.fileno())
            if self._log is not None and not self._complained:
                self._complained = True
                self._log.print(f"standard output fails ({error}); lines go to this file only")

    def _content(self) -> str:
        run = self._run
        parts = [] if run.max_epoch == 1 or not run.epoch else [counter("Epoch", run.epoch, run.max_epoch)]
        parts.append(counter("Step", run.step, run.max_step))
        if (progress := run.get_progress()) is not None:
            bar, percent = "━" * int(progress * _BAR), f"{int(progress * 100)}%"
            parts.append(percent if self._line is None else f"{bar:─<{_BAR}} {percent:>4}")
        if (rate := run.get_rate()) is not None:
            value, unit = (rate, "steps/s") if rate >= 1 else (1 / rate, "s/step")
            parts.append(f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}")
        if (eta := run.get_eta()) is not None:
            parts.append(f"ETA {humanize_duration(round(eta) if eta >= 10 else round(eta, 1))}")
        values = {best.metric: best.value for best in self.bests()}
        best = [name for name, stats in self._latest.items() if values.get(name) == stats.last]
        return "  ".join(filter(None, [*parts, log_line("", self._latest, best)]))


class LogFile:
    """Lines with a time stamp, each appended by one write: whole after a kill; a later start appends more.

    `complain` is called once if the file cannot be written; later lines try again.
    """

    def __init__(self, path: Path, complain: Print) -> None:
        self._path, self._complain, self._complained = path, complain, False

    def print(self, text: str, shorten: bool = False) -> None:
        stamp = datetime.now().astimezone().isoformat(timespec="seconds")
        lines = "\n".join(f"{stamp} {line}" for line in text.split("\n"))
        try:
            hazard.reach("console.log")
            require_no_link(self._path, self._path.parent.parent)
            self._path.parent.mkdir(exist_ok=True)
            append_line(str(self._path), lines.encode("utf-8", "backslashreplace"))
        except OSError as error:
            if not self._complained:
                self._complained = True
                self._complain(f"the log {self._path} cannot be written ({error}); lines are missing there")


class Voice:
    """Says and warns for all parts of a run, by its console or into a log alone; without both it prints."""

    def __init__(self) -> None:
        self.console: Console | LogFile | None = None
        self.warnings: list[str] = []
        self._waiting: list[tuple[str, bool]] | None = []
        """Lines said before the console has its log; None once the log is open."""

    def speak_to(self, path: Path) -> None:
        """Say everything to a log file alone, from now on."""
        self.console = LogFile(path, lambda problem: None)
        self.release()

    def say(self, message: str, shorten: bool = False) -> None:
        """Print a line, above the live line and into the run's log; `shorten` as for `Console.print`."""
        message = redacted(message)
        if self.console is None:
            print(message, flush=True)
        elif self._waiting is not None:
            self._waiting.append((message, shorten))
        else:
            self.console.print(message, shorten)

    def warn(self, message: str) -> None:
        self.warnings.append(message)
        self.say(f"warning: {message}")

    def release(self) -> None:
        """Print the lines held back until the log was open; also where it never will be."""
        waiting, self._waiting = self._waiting or [], None
        for message, shorten in waiting:
            self.say(message, shorten)


class EpochLine(Service):
    """Print the means of an epoch's steps and the results of its evaluations; at first, the baseline."""

    isolate = False
    moments = frozenset({Moment.BEFORE_EPOCH, Moment.AFTER_EPOCH})
    default_schedule = Every(epochs=1)

    print_line: Callable[[Readings], object]
    """Prints the metrics in a window, and clears it."""

    def __init__(self) -> None:
        super().__init__("epoch line")

    def run(self, boundary: Boundary) -> None:
        # a baseline comes before step 1 only; a resumed epoch keeps its window
        is_line = boundary.moment is not Moment.BEFORE_EPOCH or not boundary.step
        if is_line and boundary.readings.names():
            self.print_line(boundary.readings)

    finish = run


class LogVariables(Service):
    """Print a line with the metrics collected since the last line; at the end, with the remaining metrics.

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
        self.metrics, self.watches = name_patterns("LogVariables", metrics)
        self.formatter = checked_formatter(formatter)

    def run(self, boundary: Boundary) -> None:
        every = all_stats(boundary.readings)
        boundary.readings.clear()
        if stats := {name: every[name] for name in every if matches(name, self.metrics)}:
            self._run.println(log_line("", stats, (), self.formatter), with_tag=True, shorten=True)

    def finish(self, boundary: Boundary) -> None:
        self.run(boundary)


class LiveLine:
    """Last line of the terminal.  While open, `sys.stdout` and `sys.stderr` write above it.

    The cursor stands at its start, where other output to the terminal then begins.  A line that the user has
    begun and not ended is left alone.  `lock` is held while anything is written.
    """

    def __init__(self, stream: TextIO, lock: threading.RLock, content: Content) -> None:
        self.stream, self.lock, self.pid, self.is_open = stream, lock, os.getpid(), True
        self._content = content
        self._is_drawn = self._midline = False
        self._stand_ins = {"stdout": Above(sys.stdout, self)}
        if sys.stderr is not None and sys.stderr.isatty():
            self._stand_ins["stderr"] = Above(sys.stderr, self)
        for name, stand_in in self._stand_ins.items():
            setattr(sys, name, stand_in)

    def close(self) -> None:
        self.is_open = False
        # a foreign stand-in around ours stays: ours passes the output on, because the line is not open
        for name, stand_in in self._stand_ins.items():
            if getattr(sys, name) is stand_in:
                setattr(sys, name, stand_in.stream)
        self.erase()
        self.stream.flush()

    def draw(self) -> None:
        if self._midline or not self.is_open:
            return
        erase, self._is_drawn = "\r\x1b[J" if self._is_drawn else "", True
        _write(self.stream, erase + _crop(self._content(), _columns(self.stream) - 1) + "\r")

    def erase(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            self.stream.write("\r\x1b[J")
            self.stream.flush()  # standard error may write next, through another buffer

    def print(self, text: str) -> None:
        self.above(self.stream, ("\n" if self._midline else "") + text + "\n")

    def above(self, stream: TextIO, text: str) -> None:
        """Write `text` to `stream` in the place of the live line, and draw the live line again below."""
        self.erase()
        _write(stream, text)
        self._midline = not text.endswith(("\n", "\r"))
        self.draw()


class Above:
    """Stand-in for `sys.stdout` or `sys.stderr`: the same stream, writing above the live line."""

    def __init__(self, stream: TextIO, line: LiveLine) -> None:
        self.stream, self._line = stream, line

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _is_live(self) -> bool:
        # a forked worker neither draws nor touches a lock that another thread may have held
        return self._line.is_open and os.getpid() == self._line.pid

    def write(self, text: str) -> int:
        if not text or not self._is_live():
            return self.stream.write(text)
        with self._line.lock:
            self._line.above(self.stream, text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for text in lines:
            self.write(text)

    def flush(self) -> None:
        """Flush, and clear the live line's place: Python flushes before a prompt (`input`, pdb)."""
        if self._is_live():
            with self._line.lock:
                self._line.erase()
        self.stream.flush()


class NotebookLine:
    """Live line of a notebook's cell: one output, replaced at each redraw, with printed lines below it."""

    def __init__(self, content: Content) -> None:
        self.stream: TextIO = sys.stdout
        self._content = content
        self._output: Any = None

    def close(self) -> None: ...

    def draw(self) -> None:
        # plain text: no markup, and every viewer of notebooks shows this
        content = {"text/plain": _crop(self._content(), _CELL_COLUMNS)}
        if self._output is None:
            display: Any = import_module("IPython.display").display
            self._output = display(content, raw=True, display_id=True)
        else:
            self._output.update(content, raw=True)

    def print(self, text: str) -> None:
        _write(self.stream, text + "\n")


def live_line(lock: threading.RLock, content: Content) -> LiveLine | NotebookLine | None:
    """Make the live line of a notebook's kernel, or of a terminal with a cursor and a person before it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and "ipykernel" in sys.modules else None
    if hasattr(shell, "kernel"):
        return NotebookLine(content)
    stream = sys.stdout
    if isinstance(stream, Above):  # two consoles that draw would overwrite each other
        return None
    if stream is None or stream.closed or not stream.isatty():
        return None
    if os.environ.get("TERM", "") in ("", "dumb", "unknown") or {"CI", "SLURM_JOB_ID"} & os.environ.keys():
        return None
    return LiveLine(stream, lock, content)


def _crop(text: str, columns: int) -> str:
    text = "".join(c if c.isprintable() else "?" for c in text)
    # cells from the beginning of the text to the end of each character
    ends = list(accumulate(1 + (unicodedata.east_asian_width(c) in "WF") for c in text))
    if not text or ends[-1] <= columns:
        return text
    return text[: bisect_left(ends, columns)] + "…" if columns > 0 else ""


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _write(stream: TextIO, text: str) -> None:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()
