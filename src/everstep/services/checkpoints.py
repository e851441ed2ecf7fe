"""Schedule of checkpoints, and the rule that keeps some of them."""

from __future__ import annotations

from everstep.checkpoint import Retention
from everstep.contracts.services import Boundary, Outcome, Save, Service, Stage
from everstep.schedule import Every, Schedule


class Checkpoints(Service):
    """Save the whole state on a schedule; the writing happens in the background.

    Besides the schedule, a checkpoint is made at step 0, where the run stops, and at an interruption.

    Args:
        every: schedule of saves; default `Every(epochs=1) | Every(seconds=600)`.
        keep_last: number of the newest checkpoints that stay (1 or more), None for all.
        keep_every: a schedule of steps or epochs whose checkpoints stay for ever.
        keep_best: (metric, "min" or "max", number): the checkpoints that stay, by the metric's value at the
            checkpoint's own step: a value from outside steps, or the mean of an epoch's steps; in a loop
            without epochs, the step's value.  A checkpoint whose step has no value does not count.
    """

    stage = Stage.SAVE
    isolate = False
    window = "none"
    default_schedule = Every(epochs=1) | Every(seconds=600)

    def __init__(
        self,
        every: Schedule | None = None,
        *,
        keep_last: int | None = 3,
        keep_every: Schedule | None = None,
        keep_best: tuple[str, str, int] | None = None,
    ) -> None:
        super().__init__("checkpoints", every)
        self.retention = Retention(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
        self.watches = () if keep_best is None else (keep_best[0],)

    def run(self, boundary: Boundary) -> Outcome:
        return Outcome(actions=(Save(),))
