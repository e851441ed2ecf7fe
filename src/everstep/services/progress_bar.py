"""Progress on several lines of a terminal."""

from __future__ import annotations

import os
import sys

from everstep.schedule import Schedule
from everstep.services.console import Console, label, shown
from everstep.services.live_line import DIM, GREEN, Part, cells, layout, progress_bar

_ROWS = 12


class ProgressBar(Console):
    """Show a bar as wide as the terminal, with epoch, step, speed and ETA above and the metrics below.

    The bar takes the place of `Console`, and works the same way: it is drawn on the main thread, printed
    lines scroll above it, and every line is in `logs/run.log`.  Each metric has a line: the newest mean
    between two redraws, and the best value if it is tracked.  Where standard output is not a terminal, only
    printed lines appear.

    Args:
        every: how often the bar is redrawn and its metrics are read; default each second.
    """

    def __init__(self, every: Schedule | None = None, *, name: str | None = None) -> None:
        super().__init__(every, name=name)
        self._plain_seconds = None

    def live_lines(self, columns: int, color: bool) -> list[str]:
        lines = [layout(self.counters(), columns, color)]
        if self.progress is not None:
            lines.append(layout([progress_bar(self.progress, max(columns - 5, 1))], columns, color))
        names = self.names[: max(min(_ROWS, _terminal_lines() - 4), 0)]
        width = max((cells(label(name)) for name in names), default=0)
        return lines + [layout([self._row(name, width)], columns, color) for name in names]

    def _row(self, name: str, width: int) -> Part:
        padded = label(name) + " " * (width - cells(label(name)))
        best = self._best.get(name)
        tail = "" if best is None else f"  best {best:.4g}"
        mean = f"{shown(name, self._latest[name]):>10}"
        return Part(0, ((f"  {padded}  ", DIM), (mean, ""), (tail, GREEN)))


def _terminal_lines() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).lines or 24
    except (OSError, ValueError):
        return 24
