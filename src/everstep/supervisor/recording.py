"""Recording of metric rows: each goes to the journal, and to the comparison of steps that run again."""

from __future__ import annotations

from typing import Any

from everstep.contracts.metrics import Block
from everstep.record import Journal, Position
from everstep.supervisor.checks.verification import Verifier
from everstep.supervisor.opening.open_run import ResumePoint
from everstep.supervisor.saving.state_tree import Progress
from everstep.supervisor.streams.run_streams import Streams


class Recording:
    """Takes the rows that the collector has finished.

    `last_values` has the newest value of each metric collected outside steps, the means of epochs included;
    in a loop without epochs, of all metrics.  `last_steps` has their steps.
    """

    def __init__(
        self,
        journal: Journal,
        verifier: Verifier,
        progress: Progress,
        recovered: ResumePoint,
        streams: Streams,
    ) -> None:
        self._journal, self._verifier, self._progress = journal, verifier, progress
        self._streams = streams
        self.last_values: dict[str, float] = dict(recovered.meta.get("metrics", {}))
        self.last_steps: dict[str, int] = dict(recovered.meta.get("metric_steps", {}))
        self._flushed = (0, 0)
        """Step and epoch of the last "progress" event."""

    def add(self, block: Block) -> None:
        """Record rows; rows of a step that runs again are compared with its earlier rows."""
        if block.phase != "step" or not block.epoch:
            self.last_values[block.name] = block.values[-1]
            self.last_steps[block.name] = block.steps[-1]
        self._journal.append(block)
        self._verifier.rows(block)

    def flush(self) -> Position:
        """Hand every row and event so far, the run's progress and its ledger to the journal's file.

        Rows alone do not tell the progress: there may be one row each 1,000 steps, or none.
        """
        current = self._progress.step, self._progress.epoch
        # batches of an open step belong to no step that a resume would count
        ledgers = [] if self._verifier.places else self._streams.account()
        if not ledgers and current != self._flushed:
            ledgers = [{}]
        self._flushed = current
        for ledger in ledgers:
            data: dict[str, Any] = {"step": current[0], "epoch": current[1]}
            if ledger:
                data["ledger"] = ledger
            # a description may have the names of the user's classes
            described = any("data" in each for each in ledger.values())
            self._journal.event("progress", data, wall=True, plain=not described)
        return self._journal.flush()
