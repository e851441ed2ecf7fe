"""Sentences for the user: on the console, in the run's log, and warnings in the ending."""

from __future__ import annotations

from pathlib import Path

from everstep.redaction import redacted
from everstep.services.console import Console, LogFile


class Voice:
    """Says and warns for all parts of a run; `console` keeps the log, None for a run without a console."""

    def __init__(self) -> None:
        self.console: Console | None = None
        self.warnings: list[str] = []
        self._file: LogFile | None = None
        self._waiting: list[tuple[str, bool]] | None = []
        """Lines said before the console has its log; None once the log is open."""

    def speak_to(self, path: Path) -> None:
        """Say everything to a log file alone, from now on."""
        self.console, self._file = None, LogFile(path, lambda problem: None)
        self.release()

    def say(self, message: str, shorten: bool = False) -> None:
        """Print a line, above the live line and into the run's log; `shorten` as for `Console.print`."""
        message = redacted(message)
        if self._file is not None:
            self._file.write(message)
        elif self.console is None:
            print(message, flush=True)
        elif self._waiting is not None:
            self._waiting.append((message, shorten))
        else:
            self.console.print(message, shorten)

    def warn(self, message: str) -> None:
        self.warnings.append(message)
        self.say(f"warning: {message}")

    def release(self) -> None:
        """Say the lines that waited for the log: it is open now, or never will be."""
        waiting, self._waiting = self._waiting or [], None
        for message, shorten in waiting:
            self.say(message, shorten)
