"""`everstep watch`"""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click

from everstep.cli.common_options import index_option, run_argument
from everstep.contracts.metrics import better_when
from everstep.display.cells import in_line
from everstep.index.run_facts import GONE
from everstep.views.progress import LOOKS, pace, seconds_left

if TYPE_CHECKING:
    from everstep.cli.watched_run import Look, WatchedRun

_MOST = 8
"""Metrics that are shown, unless some are asked for."""


@click.command("watch")
@run_argument
@click.option("--metric", "metrics", multiple=True, metavar="NAME", help="Metric to show; may be repeated.")
@click.option(
    "--every", type=click.FloatRange(min=0.05), default=1.0, show_default=True, help="Seconds between looks."
)
@click.option("--stay", is_flag=True, help="Stay when a start ends, until the run is finished.")
@index_option
def command(run: str, metrics: tuple[str, ...], every: float, stay: bool, index: str | None) -> None:
    """Follow RUN until it ends: status, step, rate, time left, metrics, and its starts: were they verified?

    In a terminal the picture is drawn anew, with a chart of the first metric (the first
    loss or accuracy, if --metric names none) if plotext is installed.  In a
    pipe there is a line for each change.  Nothing is written.

    Exit status: 0 if the run is finished or stopped, 1 if it has failed, was killed or is gone, 130 after
    Ctrl-C.
    """
    from everstep.cli.watched_run import WatchedRun

    watched = WatchedRun(run, index)
    show = _Screen(watched, metrics).show if sys.stdout.isatty() else _Lines(metrics).show
    seen: deque[tuple[float, int]] = deque(maxlen=LOOKS)
    with watched.following():
        while True:
            began = time.monotonic()
            look = watched.look()
            seen.append((began, look.step))
            show(look, pace(seen))
            status = look.status.partition(",")[0]
            if status in ("finished", GONE) or (status != "running" and not stay):
                sys.exit(1 if status in ("failed", "killed", GONE) else 0)
            # a long run takes longer to read: at most a quarter of the time goes into that
            time.sleep(max(every, 3 * (time.monotonic() - began)))


def _summary(look: Look, rate: float) -> str:
    parts = [look.status + (f": {look.reason}" if look.reason else ""), f"step {look.step}"]
    if look.steps:
        parts[-1] += f" of {look.steps}" if look.steps >= look.step else ""
    if look.epoch:
        parts.append(f"epoch {look.epoch}")
    if look.status.startswith("running") and rate:
        parts.append(f"{rate:.3g} steps/s")
        if (seconds := seconds_left(look.step, look.steps, rate)) is not None:
            left = round(seconds)
            parts.append(f"ETA {left // 3600}:{left // 60 % 60:02}:{left % 60:02}")
    return "  ".join(parts)


def _values(look: Look, metrics: Sequence[str]) -> list[tuple[str, float]]:
    """List the metrics to show, with their last values."""
    if metrics:
        return [(name, look.values[name]) for name in metrics if name in look.values]
    return [*look.values.items()][:_MOST]


class _Lines:
    """Prints a line for each change."""

    def __init__(self, metrics: Sequence[str]) -> None:
        self._metrics = metrics
        self._starts = 0
        self._last: object = None

    def show(self, look: Look, rate: float) -> None:
        values = _values(look, self._metrics)
        change = look.status, look.step, look.epoch, look.starts, [f"{value:.6g}" for _, value in values]
        if change == self._last:
            return
        self._last = change
        if len(look.starts) > self._starts:
            self._starts = len(look.starts)
            click.echo(in_line(f"{look.name}: {look.starts[-1]}"))
        told = "".join(f"  {name} {value:.6g}" for name, value in values)
        click.echo(in_line(_summary(look, rate) + told))
        sys.stdout.flush()


class _Screen:
    """Draws the run in a terminal, over what it drew before."""

    def __init__(self, watched: WatchedRun, metrics: Sequence[str]) -> None:
        self._watched, self._metrics = watched, metrics
        self._drawn = 0

    def show(self, look: Look, rate: float) -> None:
        columns, rows = shutil.get_terminal_size((100, 30))
        lines = [in_line(line)[: columns - 1] for line in self._text(look, rate)]
        lines += self._chart(look, columns, rows - len(lines) - 2)
        lines = lines[: rows - 1]  # what has left the screen could not be drawn over
        back = f"\x1b[{self._drawn}F\x1b[J" if self._drawn else ""
        sys.stdout.write(back + "\n".join(lines) + "\n")
        sys.stdout.flush()
        self._drawn = len(lines)

    def _text(self, look: Look, rate: float) -> Iterator[str]:
        yield look.name
        yield _summary(look, rate)
        for name, value in _values(look, self._metrics):
            yield f"  {name:24} {value:.6g}"
        yield from look.starts[-5:]

    def _chart(self, look: Look, columns: int, rows: int) -> list[str]:
        names = [name for name, _ in _values(look, self._metrics)]
        chosen = sorted(names, key=lambda name: not self._metrics and better_when(name) is None)[:1]
        if not chosen or rows < 8 or find_spec("plotext") is None:
            return []
        from everstep.cli.plot import Line, drawn

        steps, values = self._watched.points(chosen[0])
        if len(steps) < 2:
            return []
        return drawn([Line(chosen[0], steps, values)], chosen[0], columns, min(rows, 15)).splitlines()
