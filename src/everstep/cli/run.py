"""`everstep run`: start a command again while its end is resumable, or a crash."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from everstep.cli.exit_signals import ASKING, in_words
from everstep.cli.output import say
from everstep.display.cells import in_line

if TYPE_CHECKING:
    from everstep.cli.run_starts import End, Starts

LONGEST_WAIT = 60.0
"""Seconds of the longest wait before a start."""
_WRONG_USAGE = (2, 126, 127)
"""Exit statuses of wrong usage; shells have the last two for what they cannot start."""
_AGAIN = 3
"""Exit status of a time budget, a rollback and a further try: the next start resumes."""
_REFUSED = 4
"""Exit status of a requirement that was not met: every further start ends so."""
_LASTING = frozenset(
    {
        *("ConfigError", "UsageError", "TrustError", "StateError", "RestoreError"),
        *("NotResumableError", "DivergenceError"),
    }
)
"""Errors that the same command meets again at each start, or that a person has to judge."""

HELP = """Start COMMAND, and start it again while it crashes, or can be resumed (a time budget, a rollback).

\b
  everstep run -- python train.py --lr 0.1
  everstep run -- everstep train digits.yaml
  everstep run --max-deaths 5 -- torchrun --nproc-per-node 4 train.py

A crash is an error, or a signal that kills the process.  If as many starts in a row as --max-deaths say end
without getting further, it is not started again, and these ends are printed.  How far a start came is read in
the journals and trails of the runs that it opened.

It is not started again if it is finished (status 0), after wrong usage (2), a config error, a state that does
not fit, a divergence, or a requirement that is not met (4).  After a crash it waits: --back-off seconds,
doubled for each crash in a row, 60 at most; progress resets the wait.

SIGINT, SIGTERM, SIGHUP and SIGUSR1 are passed on to COMMAND, which saves and ends, and is not started again.
If this process is killed, COMMAND gets SIGTERM (on Linux).  The exit status is that of the last start; if
signal N killed it, 128 + N.
"""


@click.command(
    "run",
    help=HELP,
    context_settings={"allow_interspersed_args": False},
)
@click.argument(
    "command_line", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND [ARGUMENT...]"
)
@click.option(
    "--max-deaths",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Number of starts in a row that may end without getting further.",
)
@click.option(
    "--back-off",
    type=click.FloatRange(min=0, max=LONGEST_WAIT),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Wait before the start after a first crash.",
)
def command(command_line: tuple[str, ...], max_deaths: int, back_off: float) -> None:
    from everstep.cli.run_starts import Starts

    with Starts(command_line) as starts:
        try:
            status = _Attendant(starts, max_deaths, back_off).run()
        except OSError as error:
            say(
                f"everstep run: {command_line[0]} cannot be started: {error.strerror}; check its name",
                err=True,
            )
            status = 127 if isinstance(error, FileNotFoundError) else 126
    sys.exit(status)


class _Attendant:
    """Starts a command again and again.

    Args:
        starts: starts it once.
        max_deaths: number of starts in a row that may end without getting further.
        back_off: seconds before the start after a first crash.
    """

    def __init__(self, starts: Starts, max_deaths: int, back_off: float) -> None:
        self._starts, self._max_deaths, self._back_off = starts, max_deaths, back_off
        self._steps = self._rollbacks = -1
        """The furthest that a start has come."""
        self._ends: list[str] = []
        """The ends since a start got further than all before, in words."""

    def run(self) -> int:
        """Start the command until it is finished, hopeless or stopped; return the exit status."""
        for number in itertools.count(1):
            end = self._starts.once()
            if end is None or self._starts.signal is not None:
                return self._stopped() if end is None else end.status
            told = f"start {number}: {_told(end)}"
            if end.status == 0 or (lasting := _lasting(end)):
                if end.status or number > 1:
                    say(f"everstep run: {told}" + (f"; {lasting}" if end.status else ""), err=True)
                return end.status
            self._take(end, told)
            if in_words(end.status).startswith("killed"):  # it could not tell that itself
                _tell(end, in_words(end.status))
            if len(self._ends) >= self._max_deaths:
                self._give_up(end)
                return end.status
            wait = min(self._back_off * 2 ** (len(self._ends) - 1), LONGEST_WAIT) if self._ends else 0.0
            say(f"everstep run: {told}; start {number + 1} in {wait:g} s", err=True)
            if not self._starts.wait(wait):
                return self._stopped()
        raise AssertionError("unreachable")

    def _stopped(self) -> int:
        assert self._starts.signal is not None
        return 128 + self._starts.signal

    def _take(self, end: End, told: str) -> None:
        """Count an end, unless a start that got further could be resumed."""
        further = end.steps > self._steps or end.rollbacks > self._rollbacks
        if further:
            self._ends.clear()
        self._steps, self._rollbacks = max(self._steps, end.steps), max(self._rollbacks, end.rollbacks)
        if not (further and _is_resumable(end)):
            self._ends.append(told)

    def _give_up(self, end: End) -> None:
        times = f"{len(self._ends)} starts in a row" if len(self._ends) > 1 else "a start"
        lines = [f"everstep run: not started again: {times} got no further:", *self._ends]
        looks = [f"everstep show {_shown(path)} tells more" for path in [*end.runs][-1:]]
        say("\n  ".join([*lines, *looks]), err=True)
        _tell(end, f"not started again: {times} got no further")


def _tell(end: End, reason: str) -> None:
    """Send a message to the receivers of the run's `Notify` services."""
    from everstep.cli.run_starts import notify

    for problem in notify(end, reason):
        say(f"everstep run: {problem}", err=True)


def _lasting(end: End) -> str:
    """Say why a further start would end in the same way; empty if it may not."""
    if end.status in _WRONG_USAGE:
        return "wrong usage; it is not started again"
    if end.status == _REFUSED:
        return "it is not started again"
    if end.kinds & _LASTING:
        return "a further start would meet that, too; it is not started again"
    return ""


def _is_resumable(end: End) -> bool:
    return end.status == _AGAIN or end.status - 128 in ASKING


def _told(end: End) -> str:
    words = in_words(end.status)
    if words == "failed":
        words = f"exit status {end.status}"
    where = "before it opened a run"
    for path, place in [*end.runs.items()][-1:]:
        where = f"after step {place.step} of {_shown(path)}"
    return in_line(f"{words} {where}" + (f": {end.error}" if end.error else ""))


def _shown(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
