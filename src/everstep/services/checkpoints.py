"""Schedule of checkpoints, and the rule that keeps some of them."""

from __future__ import annotations

import os
from typing import Literal

from everstep.arguments import number
from everstep.checkpoint import Retention
from everstep.contracts.services import Boundary, Outcome, Save, Service, Stage
from everstep.mirror import MirrorAt
from everstep.schedule import Auto, Every, Schedule


class Checkpoints(Service):
    """Save the whole state on a schedule; the writing happens in the background.

    Besides the schedule, a checkpoint is made at step 0, where the run stops, and at an interruption.

    Args:
        every: schedule of saves; default `Every(epochs=1) | Every(seconds=600)`.  "auto" means `Auto()`: as
            often as saves take at most 2 % of the time.
        keep_last: number of the newest checkpoints that stay (1 or more), None for all.
        keep_every: a schedule of steps or epochs whose checkpoints stay for ever.
        keep_best: (metric, "min" or "max", number): the checkpoints that stay, by the metric's value at the
            checkpoint's own step: a value from outside steps, or the mean of an epoch's steps; in a loop
            without epochs, the step's value.  A checkpoint whose step has no value does not count.
        mirror: a folder elsewhere, as a path or "file://...", or a URL such as "s3://BUCKET/RUN", to which
            what is committed is uploaded in the background; None for no mirror.  A start with an empty run
            directory continues from there.  S3 and other stores need the extra `mirror`.
        mirror_wait: seconds that the end of a start waits for the last upload (more than 0).
        copy: False for a state of which no second copy fits in memory: it is written from the live arrays
            while training waits, and the state that a resume from an epoch's tail needs is kept on disk.

    Raises:
        ConfigError: an argument is out of range.
    """

    stage = Stage.SAVE
    isolate = False
    measured = True
    window = "none"
    default_schedule = Every(epochs=1) | Every(seconds=600)

    def __init__(
        self,
        every: Schedule | Literal["auto"] | None = None,
        *,
        keep_last: int | None = 3,
        keep_every: Schedule | None = None,
        keep_best: tuple[str, str, int] | None = None,
        mirror: str | os.PathLike[str] | None = None,
        mirror_wait: float = 60.0,
        copy: bool = True,
    ) -> None:
        super().__init__("checkpoints", Auto() if every == "auto" else every)
        self.retention = Retention(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
        self.mirror = None if mirror is None else MirrorAt(mirror)
        self.mirror_wait = number("mirror_wait", mirror_wait, of="seconds")
        self.copy = copy
        self.watches = () if keep_best is None else (keep_best[0],)

    def run(self, boundary: Boundary) -> Outcome:
        return Outcome(actions=(Save(),))
