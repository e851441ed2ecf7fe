"""Acceptance of a divergence by a person."""

from __future__ import annotations

from pathlib import Path

from everstep.arguments import integer
from everstep.errors import ConfigError, RunDirError
from everstep.record.event_fields import ACCEPTED
from everstep.record.journal import Journal
from everstep.record.journal_format import Position
from everstep.record.journal_reader import RunJournal
from everstep.record.lock import RunLock
from everstep.record.rundir import RunDir


def accept(run_dir: Path, step: int) -> None:
    """Take away the mark of a divergence, durably: the rows from `step` on are the run's own from now on.

    Later starts do not compare those steps with earlier executions.

    Raises:
        ConfigError: the run has not diverged at that step; names the steps at which it has.
        RunLockedError: a process holds the run.
        RunDirError: the decision cannot be written.
    """
    integer("step", step, 0)
    run = RunDir.open(run_dir, create=False)
    lock = RunLock(run.path)
    lock.acquire()
    try:
        journal = RunJournal(run.path)
        found = {event.data["step"] for event in journal.divergences()}
        if step not in found:
            known = f"it has at {', '.join(map(str, sorted(found)))}" if found else "it has not diverged"
            raise ConfigError(f"{run.path} has no divergence at step {step} to accept; {known}")
        newest = [segment for segment in journal.segments() if segment.started][-1]
        _decide(run, Position(newest.number, newest.end), step)
    finally:
        lock.release()


def _decide(run: RunDir, parent: Position, step: int) -> None:
    # The decision gets a segment of its own: no file of a journal is appended to by another process.
    decision = Journal.open(run.path, run.next_segment(), parent, None, warn=lambda message: None)
    try:
        decision.decide({"what": ACCEPTED, "step": step})
    except OSError as error:
        raise RunDirError(
            error.errno, f"the decision cannot be recorded: {error.strerror}; check the disk", str(run.path)
        ) from error
    finally:
        decision.close()
