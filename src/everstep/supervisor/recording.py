"""Rows and events on their way into the journal, and the newest value of each metric."""

from __future__ import annotations

from everstep.contracts.metrics import Block
from everstep.record import Journal, Position
from everstep.supervisor.progress import Progress
from everstep.supervisor.recovered import Recovered
from everstep.supervisor.verifying import Verifier


class Recording:
    """Takes the rows that the collector has finished.

    Args:
        recovered: has the newest values as of the checkpoint.

    Attributes:
        last_values: newest value of each metric collected outside steps, the means of epochs included; in
            a loop without epochs, of all metrics.
        last_steps: step of each value in `last_values`.
    """

    def __init__(
        self, journal: Journal, verifier: Verifier, progress: Progress, recovered: Recovered
    ) -> None:
        self._journal, self._verifier, self._progress = journal, verifier, progress
        self.last_values: dict[str, float] = dict(recovered.last_values)
        self.last_steps: dict[str, int] = dict(recovered.last_steps)
        self._flushed = (0, 0)
        """Step and epoch that the journal was told last."""

    def add(self, block: Block) -> None:
        """Record rows; those of a step executed again are compared with what it gave before."""
        if block.phase != "step" or not block.epoch:
            self.last_values[block.name] = block.values[-1]
            self.last_steps[block.name] = block.steps[-1]
        self._journal.append(block)
        self._verifier.rows(block)

    def flush(self) -> Position:
        """Hand every row and event so far to the journal's file, and how far the run has come.

        Rows alone do not say it: there may be one each 1,000 steps, or none.
        """
        current = self._progress.step, self._progress.epoch
        if current != self._flushed:
            self._flushed = current
            self._journal.event("progress", {"step": current[0], "epoch": current[1]}, wall=True)
        return self._journal.flush()
