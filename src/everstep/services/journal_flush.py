"""Flushes of the journal: after 1,000 steps, an epoch or 30 seconds, and each second if somebody looks."""

from __future__ import annotations

from everstep.contracts.services import Boundary, Moment, RunView, Service, Stage
from everstep.schedule import Every

STEPS, SECONDS = 1000, 30.0


class JournalFlush(Service):
    """Hand the rows that were read at boundaries to the operating system.

    While somebody looks at the run, they are handed over each second.  Else they wait, since blocks of many
    rows take a quarter of the space and are read thirty times as fast.  A boundary each second is nothing
    new: the console asks for it, too.

    The rows become durable inside the next checkpoint's commit, and agree with that checkpoint.
    """

    stage = Stage.REPORT
    isolate = False
    window = "none"

    def __init__(self) -> None:
        super().__init__("journal flush", Every(steps=STEPS) | Every(epochs=1) | Every(seconds=1))

    def open(self, run: RunView) -> None:
        self._run = run
        self._flushed = run.clock()

    def run(self, boundary: Boundary) -> None:
        now = self._run.clock()
        due = boundary.moment is Moment.AFTER_EPOCH or boundary.step % STEPS == 0
        if due or now - self._flushed >= SECONDS or self._run.is_watched():
            self._flushed = now
            self._run.flush()
