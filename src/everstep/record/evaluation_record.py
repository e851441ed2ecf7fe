"""Evaluations outside a loop: a record beside the run's own, which another process may be writing.

RUN/evaluations is a run directory of its own (kind "evaluation", `of` the run's id).  Each evaluation is a
segment of its journal; the event "evaluation" names the checkpoint.  An evaluation counts if it is whole: if
its event "closed" says that it finished.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from everstep.arguments import checked_keywords
from everstep.contracts.metrics import Block
from everstep.durable import require_no_link
from everstep.errors import RunLockedError
from everstep.record.journal import Journal
from everstep.record.journal_format import Position
from everstep.record.journal_reader import RunJournal
from everstep.record.lock import RunLock
from everstep.record.rundir import RunDir, to_read, user_path

FOLDER = "evaluations"
_PATIENCE = 30.0
"""Seconds to wait for another process that writes its own evaluation."""


class Evaluation(NamedTuple):
    """Metrics of one stream on one checkpoint.

    Attributes:
        stream: the stream's name.
        checkpoint: name of the checkpoint; for best weights "best/METRIC/NAME".
        digest: the checkpoint's digest.
        step, epoch: the run's step and epoch when the checkpoint was saved.
        num_steps: requested number of batches, -1 for all.
        metrics: name to value; the names have the stream's prefix.
        time: when the evaluation was recorded, in seconds since 1970.
    """

    stream: str
    checkpoint: str
    digest: str
    step: int
    epoch: int
    num_steps: int
    metrics: dict[str, float]
    time: float

    def __str__(self) -> str:
        return f"{self.checkpoint}: {values_line(self.metrics)}"


def values_line(metrics: Mapping[str, float]) -> str:
    """Format metrics as a line for a person."""
    return "; ".join(f"{name}: {value:.6g}" for name, value in metrics.items())


@checked_keywords
def evaluations(run_dir: str | Path) -> list[Evaluation]:
    """List the evaluations of a run that were made outside its loop, oldest first.

        everstep.evaluations("runs/digits")[-1].metrics["test/accuracy"]

    The loop's own evaluations are rows of the run's journal.

    Raises:
        RunDirError: the path is not a run; names the runs nearby.
    """
    run_dir = RunJournal(to_read(user_path(run_dir, "run_dir"))).run_dir
    if not (run_dir / FOLDER / "journal").is_dir():
        return []
    journal = RunJournal(run_dir / FOLDER)
    values: dict[tuple[int, str], dict[str, float]] = defaultdict(dict)
    for row in journal.rows():
        if not row.wall:
            values[row.segment, row.phase][row.name] = row.value
    found, whole = [], _whole(journal)
    for event in journal.events("evaluation"):
        if event.segment not in whole:
            continue
        told = {name: value for name, value in event.data.items() if name in Evaluation._fields}
        metrics = values[event.segment, _phase(event.data["stream"])]
        found.append(Evaluation(**told, metrics=metrics))
    return found


def record_evaluation(
    run_dir: Path,
    found: Evaluation,
    facts: Mapping[str, Any],
    wall: Mapping[str, float],
    *,
    lock: bool = True,
) -> None:
    """Add an evaluation to a run's record; whole or not at all.

    Args:
        facts: the evaluation's provenance (`everstep.record.facts`).
        wall: further metrics, which depend on the clock.
        lock: False where the file system has no locks.

    Raises:
        RunDirError, RunLockedError, OSError: the evaluation cannot be written; no part of it counts.
    """
    parent = RunDir.open(run_dir, create=False)
    about = {"id": f"evaluations-of-{parent.id}", "kind": "evaluation", "of": parent.id}
    require_no_link(parent.path / FOLDER, parent.path)
    home = RunDir.open(parent.path / FOLDER, seed=parent.seed, about=about)
    reason = f"{found.stream} evaluated on {found.checkpoint}"
    with evaluation_segment(home, facts, reason, lock=lock, patience=_PATIENCE) as record:
        for values, is_wall in ((found.metrics, False), (wall, True)):
            record.append(found.stream, found.step, found.epoch, values, wall=is_wall)
        told = {name: value for name, value in found._asdict().items() if name != "metrics"}
        record.journal.event("evaluation", {"run": parent.id, **told})


class EvaluationSegment:
    """Segment of a record that is being written.

    Attributes:
        journal: takes events.
    """

    def __init__(self, journal: Journal, before: RunJournal) -> None:
        self.journal = journal
        self._seqs = Counter((row.phase, row.name, row.step, row.epoch) for row in before.rows())

    def append(
        self, stream: str, step: int, epoch: int, values: Mapping[str, float], *, wall: bool = False
    ) -> None:
        """Add a stream's metrics on a checkpoint: name to value."""
        phase = _phase(stream)
        for name, value in values.items():
            row = ([step], [value], [1], [self._seqs[phase, name, step, epoch]])
            self.journal.append(Block(epoch, phase, name, wall, *row))


@contextmanager
def evaluation_segment(
    home: RunDir, facts: Mapping[str, Any], reason: str, *, lock: bool = True, patience: float = 0.0
) -> Iterator[EvaluationSegment]:
    """Write a segment outside a loop; the segment counts, beside the earlier ones, if the block ends well.

    Args:
        home: the record's directory; locked meanwhile.
        facts: the segment's provenance (`everstep.record.facts`).
        reason: how the segment finished, in words.
        lock: False where the file system has no locks.
        patience: seconds to wait for another process that writes there.

    Raises:
        RunDirError, RunLockedError, OSError: the segment cannot be written; no part of it counts.
    """
    with _locked(home.path, lock, patience):
        before = RunJournal(home.path)
        segment, quiet = home.next_segment(), (lambda message: None)  # a failure is raised below
        journal = Journal.open(home.path, segment, _end(before), dict(facts), warn=quiet)
        try:
            yield EvaluationSegment(journal, before)
            # The last event makes the segment count, so a kill before the sync leaves no half evaluation.
            journal.event("closed", {"status": "finished", "reason": reason}, wall=True)
            journal.sync()
        except BaseException as error:
            told = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
            journal.event("closed", told, wall=True)
            raise
        finally:
            journal.close()


def _phase(stream: str) -> str:
    return f"eval/{stream}"


def _whole(journal: RunJournal) -> set[int]:
    """Numbers of the segments that finished."""
    ends = {event.segment: event.data["status"] for event in journal.events("closed", valid=False)}
    return {segment for segment, status in ends.items() if status == "finished"}


def _end(journal: RunJournal) -> Position | None:
    """Position after the newest whole segment."""
    whole = _whole(journal)
    ends = [Position(s.number, s.end) for s in journal.segments() if s.number in whole]
    return ends[-1] if ends else None


@contextmanager
def _locked(folder: Path, wanted: bool, patience: float) -> Iterator[None]:
    lock = RunLock(folder)
    until = time.monotonic() + patience
    while wanted:
        try:
            lock.acquire()
            break
        except RunLockedError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.02)
    try:
        yield
    finally:
        lock.release()
