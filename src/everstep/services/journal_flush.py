"""Flushes of the journal: a row reaches the file after 1,000 steps or 30 seconds at the latest."""

from __future__ import annotations

from everstep.contracts.services import Boundary, RunView, Service, Stage
from everstep.schedule import Every


class JournalFlush(Service):
    """Hand the rows that were read at this boundary to the operating system.

    The rows become durable inside the next checkpoint's commit, and agree with that checkpoint.
    """

    stage = Stage.REPORT
    isolate = False
    window = "none"

    def __init__(self) -> None:
        super().__init__("journal flush", Every(steps=1000) | Every(epochs=1) | Every(seconds=30))

    def open(self, run: RunView) -> None:
        self._flush = run.flush

    def run(self, boundary: Boundary) -> None:
        self._flush()
