"""Live line of a terminal: drawn below the lines that are printed, and never wider than the screen.

The live line is redrawn on the main thread.  No thread, no cursor hidden, no terminal mode changed: a run
that is killed with SIGKILL leaves the terminal as it was.

`rich.live` cannot be used: its stand-in for `sys.stdout` reads the user's `print(..., end="", flush=True)` as
markup (a stray "[/x]" raises inside the training loop), wraps long lines, and swallows prompts.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TextIO

_ERASE = "\r\x1b[K"
_ERASE_BELOW = "\r\x1b[J"
DIM, BOLD, CYAN, GREEN = "2", "1", "36", "32"
"""SGR styles."""
_ASCII = str.maketrans({"±": "+/-", "━": "#", "╸": "-", "─": "-", "…": ""})


class Part(NamedTuple):
    """Piece of the live line; where the line is too long, pieces of the highest rank go first."""

    rank: int
    spans: tuple[tuple[str, str], ...]  # text and SGR style ("" for none)

    @property
    def width(self) -> int:
        return sum(cells(text) for text, _ in self.spans)


def progress_bar(progress: float, width: int, rank: int = 0) -> Part:
    """Make a bar of `width` cells, and five more for the percentage."""
    halves = int(progress * width * 2)
    done = "━" * (halves // 2) + "╸" * (halves % 2)
    return Part(rank, ((done, CYAN), ("─" * (width - len(done)), DIM), (f" {int(progress * 100):3d}%", "")))


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


class LiveLine:
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
        self._stand_ins = {"stdout": Above(sys.stdout, self)}
        if sys.stderr is not None and sys.stderr.isatty():
            self._stand_ins["stderr"] = Above(sys.stderr, self)
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
        write(self.stream, erase + "\r\n".join(lines) + "\r" + up)

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
        write(stream, text)
        self._midline = not text.endswith(("\n", "\r"))
        self.draw()


class Above:
    """Stand-in for `sys.stdout` or `sys.stderr`: the same stream, writing above the live line."""

    def __init__(self, stream: TextIO, line: LiveLine) -> None:
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
    return not {"CI", "SLURM_JOB_ID"} & os.environ.keys()


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(text.translate(_ASCII).encode(encoding, "replace").decode(encoding))
    stream.flush()


def discard_output(stream: TextIO) -> None:
    """Let a `stream` that nobody reads lead nowhere, so that no flush fails at Python's exit."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
