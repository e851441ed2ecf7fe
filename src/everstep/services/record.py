"""Keeps the journal written: every row reaches it at the latest 1,000 steps or 30 seconds later."""

from __future__ import annotations

from collections.abc import Callable

from everstep.contracts.services import Boundary, Service, Stage
from everstep.schedule import Every


class Record(Service):
    """Hands the rows that were read at this boundary to the operating system.

    They become durable inside the next checkpoint's commit, with which they agree.

    Args:
        flush: the journal's flush.
    """

    stage = Stage.REPORT
    isolate = False
    window = "none"

    def __init__(self, flush: Callable[[], object]) -> None:
        super().__init__("record", Every(steps=1000) | Every(epochs=1) | Every(seconds=30))
        self._flush = flush

    def run(self, boundary: Boundary) -> None:
        self._flush()
