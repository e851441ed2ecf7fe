"""Screen output of a run: one live line in a terminal, plain lines elsewhere, and a log file of all lines.

The live line is redrawn on the main thread, at this service's boundaries (each second) and below
every line that is printed.  No thread, no cursor hidden, no terminal mode changed: a run that is
killed with SIGKILL leaves the terminal as it was.

`rich.live` cannot be used: its stand-in for `sys.stdout` reads the user's `print(..., end="", flush=True)` as
markup (a stray "[/x]" raises inside the training loop), wraps long lines, and swallows prompts.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import threading
import unicodedata
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TextIO

from everstep import hazard
from everstep.arguments import number
from everstep.contracts.services import Boundary, RunView, Service, Stage
from everstep.durable import require_no_link
from everstep.metrics.collector import is_wall
from everstep.metrics.formatting import humanize_duration, log_line, log_tag, loss_first
from everstep.metrics.statistics import Stats
from everstep.schedule import Every, Schedule

Print = Callable[[str], None]

_ERASE = "\r\x1b[K"
_ERASE_BELOW = "\r\x1b[J"
_DIM, _BOLD, _CYAN, _GREEN = "2", "1", "36", "32"
_ASCII = str.maketrans({"±": "+/-", "━": "#", "╸": "-", "─": "-"})


class Console(Service):
    """Show progress and print lines; every printed line also goes to `logs/run.log`, with the time.

    In a terminal a live line shows epoch, step, a bar, steps per second, ETA and the latest metrics;
    printed lines, also from the user's own `print`, scroll above it.  Elsewhere (a file, a pipe, CI,
    SLURM, a notebook) a progress line is printed now and then, in the middle of an epoch, too: its means
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
        self._log: _LogFile | None = None
        self._line: _LiveLine | None = None
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
        self._log = _LogFile(Path(run.run_dir) / "logs" / "run.log", self._emit)
        taken = isinstance(sys.stdout, _Above)  # two consoles that draw would overwrite each other
        if self._sink is None and not taken and is_live_terminal(sys.stdout):
            self._line = _LiveLine(sys.stdout, self._lock, self.live_lines)
            self._line.open()

    def run(self, boundary: Boundary) -> None:
        now = self._run.clock()
        self._speed.update(now, boundary.step)
        if self._line is None and (self._next_plain is None or now < self._next_plain):
            return
        readings = boundary.readings
        stats = {name: s for name in readings.names() if (s := readings.stats(name)) is not None}
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
            self._guarded(lambda: _write(stream, (fitted(text, stream) if shorten else text) + "\n"))

    def _guarded(self, output: Callable[[], None]) -> None:
        """Run an output that may fail: say once, in the log, that output is lost; training continues."""
        try:
            output()
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            if isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.EIO):
                _discard_output(sys.stdout if self._line is None else self._line.stream)
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
            parts.append(Part(1, (("ETA ", _DIM), (humanize_duration(eta), ""))))
        return parts

    @property
    def progress(self) -> float | None:
        """Done part of the run, 0 to 1; None if the run is unbounded."""
        return self._run.get_progress()

    @property
    def names(self) -> list[str]:
        """Names of the metrics in order, times last: the line has the speed already."""
        return sorted(self._latest, key=loss_first)


# ---------------------------------------------------------------------------------- the live line


class Part(NamedTuple):
    """Piece of the live line; where the line is too long, pieces of the highest rank go first."""

    rank: int
    spans: tuple[tuple[str, str], ...]  # text and SGR style ("" for none)

    @property
    def width(self) -> int:
        return sum(cells(text) for text, _ in self.spans)


def _counter(word: str, value: int, limit: int | None, rank: int) -> Part:
    of = "" if limit is None else f"/{limit}"
    return Part(rank, ((f"{word} ", _DIM), (str(value), _BOLD), (of, _DIM)))


def progress_bar(progress: float, width: int, rank: int = 0) -> Part:
    """Make a bar of `width` cells, and five more for the percentage."""
    halves = int(progress * width * 2)
    done = "━" * (halves // 2) + "╸" * (halves % 2)
    return Part(rank, ((done, _CYAN), ("─" * (width - len(done)), _DIM), (f" {int(progress * 100):3d}%", "")))


def _metric(name: str, stats: Stats, best: bool, rank: int) -> Part:
    return Part(rank, ((f"{label(name)} ", _DIM), (shown(name, stats), ""), (" (*)" if best else "", _GREEN)))


def label(name: str) -> str:
    """Format a metric's name."""
    return name.replace("_", " ")


def shown(name: str, stats: Stats) -> str:
    """Format a metric's mean."""
    return humanize_duration(stats.mean) if is_wall(name) else f"{stats.mean:.4g}"


def cells(text: str) -> int:
    """Count the terminal cells that `text` takes: East Asian wide characters take two."""
    if text.isascii():
        return len(text)
    return sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def layout(parts: list[Part], columns: int, color: bool) -> str:
    """Join parts to one line of at most `columns` cells."""
    parts = list(parts)
    while len(parts) > 1 and sum(part.width + 2 for part in parts) - 2 > columns:
        parts.remove(max(parts))
    left, line = columns, []
    for index, part in enumerate(parts):
        for text, style in ((("  ", ""),) if index else ()) + part.spans:
            text = _crop(text, left)
            left -= cells(text)
            line.append(f"\x1b[{style}m{text}\x1b[0m" if style and color and text else text)
    return "".join(line)


def _crop(text: str, room: int) -> str:
    if not text.isprintable():
        text = "".join(c if c.isprintable() else "?" for c in text)
    while text and cells(text) > room:
        text = text[:-1]
    return text


def fitted(text: str, stream: TextIO) -> str:
    """Shorten a log line that is wider than the terminal: without deviations, then without its last parts.

    "; " divides the parts; the number of those that are left out stands at the end ("…+3").  Where `stream`
    is not a terminal, the line stays whole.
    """
    columns = _columns(stream) if stream.isatty() else cells(text)
    if cells(text) <= columns:
        return text
    parts = re.sub(r" \(±[^)]*\)", "", text).split("; ")
    for count in range(len(parts), 0, -1):
        left_out = f"; …+{len(parts) - count}" if count < len(parts) else ""
        line = "; ".join(parts[:count]) + left_out
        if cells(line) <= columns:
            return line
    return _crop(_crop(parts[0], columns - cells(left_out) - 1) + "…" + left_out, columns)


class _LiveLine:
    """Last line, or lines, of the terminal.  While open, `sys.stdout` and `sys.stderr` write above it.

    After drawing, the cursor stands at the start of the live line, so that any other output to the terminal
    starts there.  A line that the user has begun and not ended is left alone.
    """

    def __init__(
        self, stream: TextIO, lock: threading.RLock, lines: Callable[[int, bool], list[str]]
    ) -> None:
        self.stream = stream
        self.lock = lock
        self.pid = os.getpid()
        self.open_ = False
        self._lines = lines
        self._drawn = 0
        """Number of lines drawn now."""
        self._midline = False
        self._color = "NO_COLOR" not in os.environ

    def open(self) -> None:
        self.open_ = True
        self._stand_ins = {"stdout": _Above(sys.stdout, self)}
        if sys.stderr is not None and sys.stderr.isatty():
            self._stand_ins["stderr"] = _Above(sys.stderr, self)
        for name, stand_in in self._stand_ins.items():
            setattr(sys, name, stand_in)

    def close(self) -> None:
        self.open_ = False
        # A foreign stand-in around ours stays: ours passes the output on, because open_ is False.
        for name, stand_in in self._stand_ins.items():
            if getattr(sys, name) is stand_in:
                setattr(sys, name, stand_in.stream)
        self.erase()
        self.stream.flush()

    def draw(self) -> None:
        if self._midline or not self.open_:
            return
        lines = self._lines(_columns(self.stream) - 1, self._color)
        up = f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else ""
        erase = self._erasing()
        self._drawn = len(lines)
        _write(self.stream, erase + "\r\n".join(lines) + "\r" + up)

    def erase(self) -> None:
        if self._drawn:
            erase = self._erasing()
            self._drawn = 0
            self.stream.write(erase)
            self.stream.flush()  # standard error may write next, through another buffer

    def _erasing(self) -> str:
        return _ERASE if self._drawn <= 1 else _ERASE_BELOW

    def print(self, text: str) -> None:
        self.above(self.stream, ("\n" if self._midline else "") + text + "\n")

    def above(self, stream: TextIO, text: str) -> None:
        """Write `text` to `stream` in the place of the live line, and draw the live line again below."""
        self.erase()
        _write(stream, text)
        self._midline = not text.endswith(("\n", "\r"))
        self.draw()


class _Above:
    """Stand-in for `sys.stdout` or `sys.stderr`: the same stream, writing above the live line."""

    def __init__(self, stream: TextIO, line: _LiveLine) -> None:
        self.stream = stream
        self._line = line

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        line = self._line
        # a forked worker neither draws nor touches a lock that another thread may have held
        if not text or not line.open_ or os.getpid() != line.pid:
            return self.stream.write(text)
        with line.lock:
            line.above(self.stream, text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for text in lines:
            self.write(text)

    def flush(self) -> None:
        """Flush, and clear the live line's place: Python flushes before a prompt (`input`, pdb)."""
        line = self._line
        if line.open_ and os.getpid() == line.pid:
            with line.lock:
                line.erase()
        self.stream.flush()


def is_live_terminal(stream: TextIO | None) -> bool:
    """Whether a live line can be drawn on `stream`: a terminal with a cursor and a person before it."""
    if stream is None or stream.closed or not stream.isatty():
        return False
    if os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        return False
    return not ({"CI", "SLURM_JOB_ID"} & os.environ.keys() or "ipykernel" in sys.modules)


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


# ------------------------------------------------------------------------------------ small parts


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(text.translate(_ASCII).encode(encoding, "replace").decode(encoding))
    stream.flush()


def _discard_output(stream: TextIO) -> None:
    """Let a `stream` that nobody reads lead nowhere, so that no flush fails at Python's exit."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


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


class _LogFile:
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
