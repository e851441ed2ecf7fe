"""Evaluations outside a loop: a page each in `evaluations/`, which any process writes at any time."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from everstep.arguments import checked_keywords
from everstep.record.failure_pages import read_pages, write_page
from everstep.record.journal_reader import RunJournal
from everstep.record.rundir import RunDir, to_read, user_path
from everstep.redaction import without_credentials

FOLDER = "evaluations"


class Evaluation(NamedTuple):
    """Metrics of one stream on one checkpoint.

    Attributes:
        stream: name of the stream.
        checkpoint, digest: its name, for best weights "best/METRIC/NAME"; its digest.
        step, epoch: the run's, when the checkpoint was saved.
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

        everstep.runs.evaluations("runs/digits")[-1].metrics["test/accuracy"]

    The loop's own evaluations are rows of the run's journal.
    """
    folder = RunJournal(to_read(user_path(run_dir, "run_dir"))).run_dir / FOLDER
    return [] if folder.is_symlink() else sorted(read_pages(folder, Evaluation), key=lambda page: page.time)


def record_evaluation(
    run_dir: Path, evaluation: Evaluation, facts: Mapping[str, Any], wall: Mapping[str, float]
) -> None:
    """Add an evaluation to a run's record, with its provenance and with metrics that depend on the clock."""
    run = RunDir.open(run_dir, create=False)
    name = f"step-{evaluation.step:08}-{secrets.token_hex(6)}.json"
    more = {"run": run.id, "wall": dict(wall), "facts": dict(facts)}
    write_page(run.path, FOLDER, name, without_credentials({**evaluation._asdict(), **more}))
