"""`everstep run`: start a command again while its end is resumable, or a crash."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import click

from everstep.cli import common as cli
from everstep.display.cells import in_line

_LONGEST_WAIT = 60.0
"""Seconds of the longest wait before a start."""
_WAIT = click.FloatRange(0, _LONGEST_WAIT)
_SAVING = 600.0
"""Seconds to wait for what a command that was asked to end has left."""
_WRONG_USAGE = (2, 126, 127)
"""Exit statuses of wrong usage; shells have the last two for what they cannot start."""
_AGAIN, _REFUSED = 3, 4
"""Exit statuses: the next start resumes; every further start ends so."""
_LASTING = {
    *("ConfigError", "UsageError", "TrustError", "StateError", "RestoreError"),
    *("NotResumableError", "DivergenceError"),
}
"""Errors that the same command meets again at each start, or that a person has to judge."""


@cli.command(interspersed=False)
def run_command(
    command_line: tuple[str, ...] = cli.argument(
        "COMMAND [ARGUMENT...]", nargs=-1, required=True, type=click.UNPROCESSED
    ),
    max_deaths: int = cli.option(cli.COUNT, "Starts in a row that may get no further.", default=3),
    back_off: float = cli.option(_WAIT, "Seconds to wait before the start after a first crash.", default=1.0),
) -> None:
    """Start COMMAND, and start it again while it crashes, or can be resumed (a time budget, a rollback).

    \b
      everstep run -- python train.py --lr 0.1
      everstep run -- everstep train digits.yaml
      everstep run --max-deaths 5 -- torchrun --nproc-per-node 4 train.py

    A crash is an error, or a signal that kills the process.  After it, --back-off seconds are waited, doubled
    for each crash in a row, 60 at most.  If --max-deaths starts in a row end without getting further, as the
    journals of their runs say, COMMAND is not started again.

    It is not started again either if it is finished (status 0), after wrong usage (2), a config error, a
    state that does not fit, a divergence (5 from everstep train), or a requirement that is not met (4).

    SIGINT, SIGTERM, SIGHUP and SIGUSR1 are passed on to COMMAND, which saves and ends, and is not started
    again.  If this process is killed, COMMAND gets SIGTERM (on Linux).  The exit status is that of the last
    start; if signal N killed it, 128 + N.
    """
    with tempfile.TemporaryDirectory(prefix="everstep-run-") as folder:  # for this user alone
        starts = _Starts(command_line, Path(folder, "reports"))
        try:
            status = _attend(starts, max_deaths, back_off)
        except OSError as error:
            _report(f"{command_line[0]} cannot be started: {error.strerror}; check its name")
            status = 127 if isinstance(error, FileNotFoundError) else 126
    sys.exit(status)


def _report(text: str) -> None:
    cli.say(f"everstep run: {text}", err=True)


def _attend(starts: _Starts, max_deaths: int, back_off: float) -> int:
    from everstep.polling import wait_until

    furthest, known = (-1, -1), dict[Path, tuple[int, ...]]()
    ends: list[str] = []  # since a start got further than all before
    for number in itertools.count(1):
        end = starts.once()
        if end is None or starts.signal is not None:
            break
        described = f"start {number}: {end.described()}"
        hopeless = end.hopeless()
        if end.status == 0 or hopeless:
            if end.status or number > 1:
                _report(described + hopeless)
            return end.status
        sums = sum(step for step, _ in end.runs.values()), sum(count for _, count in end.runs.values())
        # a start need not open runs that were finished before; a new run alone is no progress
        pairs = [(sums, furthest), *((at, known.get(path, at)) for path, at in end.runs.items())]
        further = any(now[0] > before[0] or now[1] > before[1] for now, before in pairs)
        if further:
            ends.clear()
        furthest = max(furthest[0], sums[0]), max(furthest[1], sums[1])
        known |= {path: tuple(map(max, at, known.get(path, at))) for path, at in end.runs.items()}
        if not (further and (end.status == _AGAIN or end.status - 128 in cli.ASKING)):
            ends.append(described)
        if cli.in_words(end.status).startswith("killed"):  # it could not report that itself
            _notify(end, cli.in_words(end.status))
        if len(ends) >= max_deaths:
            times = f"{len(ends)} starts in a row" if len(ends) > 1 else "a start"
            _report("\n  ".join([f"not started again: {times} got no further:", *ends]))
            _notify(end, f"not started again: {times} got no further")
            return end.status
        wait = min(back_off * 2 ** (len(ends) - 1), _LONGEST_WAIT) if ends else 0.0
        _report(f"{described}; start {number + 1} in {wait:g} s")
        if wait_until(lambda: starts.signal is not None, wait):
            end = None
            break
    return 128 + (starts.signal or 0) if end is None else end.status


class _End(NamedTuple):
    """End of a start; the status is 128 + N where signal N killed the process, as shells tell it.

    `runs`: the runs that it opened, with the last step and the rollbacks of each.
    """

    status: int
    kinds: set[str]
    """Names of the classes of the errors that ended its processes; empty where they reported none."""
    error: str
    runs: dict[Path, tuple[int, int]]
    receivers: list[dict[str, Any]]
    """What its `Notify` services reported of those who are to be told of which events."""

    def hopeless(self) -> str:
        """Say why a further start would end in the same way; empty if it may not."""
        if self.status in _WRONG_USAGE:
            return "; wrong usage; it is not started again"
        if self.status in (_REFUSED, cli.DIVERGED) or self.kinds & _LASTING:
            return "; a further start would meet that, too; it is not started again"
        return ""

    def described(self) -> str:
        ending = cli.in_words(self.status)
        if ending == "failed":
            ending = f"exit status {self.status}"
        place = "before it opened a run"
        for path, (step, _) in [*self.runs.items()][-1:]:
            name = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            place = f"after step {step} of {name}"
        return in_line(f"{ending} {place}" + (f": {self.error}" if self.error else ""))


def _notify(end: _End, reason: str) -> None:
    """Notify those whom the run's `Notify` services name of what the run could not report itself."""
    from everstep.services.notify import Target, facts_of

    for run_dir, (step, _) in [*end.runs.items()][-1:]:
        facts = facts_of(run_dir, "failed", reason, step=step)
        receivers = {json.dumps(each["target"]): each for each in end.receivers if "failed" in each["on"]}
        for each in receivers.values():
            line, url, timeout = each["target"]
            target = Target(tuple(line), url, timeout)
            if (problem := target.send(facts)) is not None:
                _report(f"{target} was not told: {problem}")


class _Starts:
    """Starts a command, and passes signals on to it; made in the main thread."""

    def __init__(self, command_line: tuple[str, ...], reports: Path) -> None:
        self._command, self._reports = command_line, reports
        self.signal: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        for number in cli.ASKING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGHUP is under nohup
                signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        self._send(number)

    def _send(self, number: int) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)  # as a terminal does: a shell may stand between

    def once(self) -> _End | None:
        """Start the command, and wait until it ends; None if a signal came before."""
        from everstep.drill.processes import kill_marked, with_parent
        from everstep.polling import wait_until
        from everstep.unattended import REPORTS

        self._reports.write_bytes(b"")
        began = time.time()
        # held back: a signal finds either no process, or the one that it is passed on to, once
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, cli.ASKING)
        end_with_parent = with_parent(signal.SIGTERM)

        def prepare() -> None:
            end_with_parent()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        try:
            if self.signal is not None:
                return None
            process = self._process = subprocess.Popen(
                self._command,
                env={**os.environ, REPORTS: str(self._reports)},
                start_new_session=True,  # Ctrl-C reaches this process alone, and comes to the command once
                preexec_fn=prepare,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        status = process.wait()
        if self.signal is not None:
            # a shell between ends at once, and what it has started may still save
            wait_until(lambda: not _is_any_left(process.pid), _SAVING)
        elif status:
            # what a failed start has left (workers, ranks) would meet the next start
            self._send(signal.SIGKILL)
            kill_marked(os.fsencode(f"{REPORTS}={self._reports}"))
        self._process = None
        return _end(status, [json.loads(line) for line in self._reports.read_bytes().splitlines()], began)


def _is_any_left(group: int) -> bool:
    with suppress(ChildProcessError):  # orphans are ours where this is the first process of a container
        os.waitpid(-group, os.WNOHANG)
    with suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


def _end(status: int, reports: list[dict[str, Any]], began: float) -> _End:
    """Make the end of a start of its reports, and of how far its runs came by their journals and trails."""
    from everstep.errors import EverstepError
    from everstep.record import RunJournal, newest_step

    errors = [report for report in reports if report["word"] == "error"]
    runs: dict[Path, tuple[int, int]] = {}
    status = 128 - status if status < 0 else status
    for path in [Path(report["path"]) for report in reports if report["word"] == "run"]:
        with suppress(EverstepError, OSError):
            journal = RunJournal(path)
            newest = max((segment.number for segment in journal.segments()), default=0)
            runs[path] = max(journal.status().step, newest_step(path, newest)), len(journal.rollbacks())
            for event in journal.events("interrupted", valid=False) if status == 0 else ():
                # torchrun takes 0 alone for an end without a failure
                if status == 0 and event.time >= began and isinstance(event.data.get("status"), int):
                    status = int(event.data["status"])
    kinds = {kind for error in errors for kind in error["kinds"]}
    error = errors[0]["what"] if errors else ""
    return _End(status, kinds, error, runs, [report for report in reports if report["word"] == "notify"])
