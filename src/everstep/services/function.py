"""Plain function as a service, made by `loop.on`."""

from __future__ import annotations

from everstep.contracts.services import SCHEDULED, Boundary, Moment, Outcome, Service, ServiceFunction, Stage
from everstep.schedule import Every, Schedule


class FunctionService(Service):
    """Call `fn(boundary)` at one moment.

    Args:
        every: for AFTER_STEP and AFTER_EPOCH: a schedule, or n for every n steps or epochs.
    """

    stage = Stage.REPORT

    def __init__(self, moment: Moment, fn: ServiceFunction, every: Schedule | int | None, name: str) -> None:
        if every is None or isinstance(every, int):
            count = 1 if every is None else every
            every = Every(epochs=count) if moment is Moment.AFTER_EPOCH else Every(steps=count)
        super().__init__(name, every)
        self.moments = frozenset({moment})
        if moment not in SCHEDULED:
            self.window = "none"
        self._fn = fn

    def run(self, boundary: Boundary) -> Outcome | None:
        return self._fn(boundary)
