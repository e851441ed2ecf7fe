"""The live line: drawn below the lines that are printed, in a terminal or in a notebook's cell.

A terminal's line is redrawn on the main thread.  No thread, no cursor hidden, no terminal mode changed: a
run that is killed with SIGKILL leaves the terminal as it was.

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
from importlib import import_module
from typing import Any, NamedTuple, TextIO

_ASCII = str.maketrans({"±": "+/-", "━": "#", "╸": "-", "─": "-", "…": "."})
_CELL_COLUMNS = 110
"""Characters in a line of a notebook, whose cells do not tell their width."""


class Part(NamedTuple):
    """Piece of a live line; where the line is too long, pieces of the highest rank go first."""

    rank: int
    text: str


def progress_bar(progress: float, width: int = 20) -> str:
    """Draw a bar of `width` cells, and five more for the percentage."""
    halves = int(progress * width * 2)
    done = "━" * (halves // 2) + "╸" * (halves % 2)
    return f"{done}{'─' * (width - len(done))} {int(progress * 100):3d}%"


def cells(text: str) -> int:
    """Count the terminal cells that `text` takes: East Asian wide characters take two."""
    if text.isascii():
        return len(text)
    return sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def layout(parts: list[Part], columns: int) -> str:
    """Join parts to one line of at most `columns` cells."""
    parts = list(parts)
    while len(parts) > 1 and sum(cells(part.text) + 2 for part in parts) - 2 > columns:
        parts.remove(max(parts))
    return _crop("  ".join(part.text for part in parts), columns)


def _crop(text: str, room: int) -> str:
    text = "".join(c if c.isprintable() else "?" for c in text)
    while text and cells(text) > room:
        text = text[:-1]
    return text


def fitted(text: str, stream: TextIO) -> str:
    """Shorten a log line that is wider than the terminal: without deviations, then without its end.

    Where `stream` is not a terminal, the line stays whole.
    """
    columns = terminal_columns(stream) if stream.isatty() else cells(text)
    if cells(text) > columns:
        text = re.sub(r" \(±[^)]*\)", "", text)
    return text if cells(text) <= columns else _crop(text, columns - 1) + "…"


class LiveLine:
    """Last line of the terminal.  While open, `sys.stdout` and `sys.stderr` write above them.

    After drawing, the cursor stands at the start of the live line, so that any other output to the
    terminal starts there.  A line that the user has begun and not ended is left alone.

    Args:
        stream: the terminal.
        lock: held while anything is written.
        content: returns the line to draw, of at most so many cells.
    """

    def __init__(self, stream: TextIO, lock: threading.RLock, content: Callable[[int], str]) -> None:
        self.stream = stream
        self.lock = lock
        self.pid = os.getpid()
        self.is_open = False
        self._content = content
        self._drawn = False
        self._midline = False

    def open(self) -> None:
        self.is_open = True
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
        erase, self._drawn = self._erasing(), True
        write(self.stream, erase + self._content(terminal_columns(self.stream) - 1) + "\r")

    def erase(self) -> None:
        erase, self._drawn = self._erasing(), False
        if erase:
            self.stream.write(erase)
            self.stream.flush()  # standard error may write next, through another buffer

    def _erasing(self) -> str:
        return "\r\x1b[J" if self._drawn else ""

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
    """Live line of a notebook's cell: one output, replaced at each redraw, with printed lines below it.

    It stays with its last content when the loop ends, so that the saved notebook says where the run stood.
    Its methods are those of `LiveLine`.
    """

    def __init__(self, content: Callable[[int], str]) -> None:
        self.stream: TextIO = sys.stdout
        self._content = content
        self._output: Any = None

    def open(self) -> None:
        """Draw nothing: the first draw makes the output."""

    def close(self) -> None:
        """Leave the last content in the cell."""

    def draw(self) -> None:
        # plain text: no markup, and every viewer of notebooks shows this
        content = {"text/plain": self._content(_CELL_COLUMNS)}
        if self._output is None:
            display: Any = import_module("IPython.display").display
            self._output = display(content, raw=True, display_id=True)
        else:
            self._output.update(content, raw=True)

    def print(self, text: str) -> None:
        write(self.stream, text + "\n")


def live_line(lock: threading.RLock, content: Callable[[int], str]) -> LiveLine | NotebookLine | None:
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


def terminal_columns(stream: TextIO) -> int:
    """Return the columns of a terminal; 80 where it does not tell."""
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
