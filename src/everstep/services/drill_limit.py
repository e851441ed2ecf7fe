"""Limit of a drill: runs are left after some steps, so that a script that takes hours can be drilled.

The limit is the drill's and not the run's.  The run does not end there: it is interrupted, as by SIGTERM,
with its state saved, and reaches neither the tail of the epoch nor the lines after the loop.  The run's own
max_step, schedules and configuration are as the script gives them.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from everstep.contracts.services import Boundary, Interrupt, Moment, Outcome, RunView, Save, Service, Stage
from everstep.drilled import LIMIT
from everstep.errors import Interrupted
from everstep.group import exit_status
from everstep.record import located
from everstep.schedule import Every, Instant


class DrillLimit(Service):
    """Leave the run after some steps, or at the first step after some seconds; the exit status is 0.

    Args:
        steps: total of the run, 1 or more; None for no limit.
        seconds: seconds since the run was opened; None for no limit.
        save_every: number of steps between checkpoints that the drill adds; None for none.
        run: the run directory that has the limit, as the script gives it, absolute; None for every run.
    """

    moments = frozenset({Moment.ENTER_LOOP, Moment.AFTER_STEP})
    stage = Stage.DECIDE
    controller = True
    window = "none"
    isolate = False

    def __init__(
        self,
        *,
        steps: int | None = None,
        seconds: float | None = None,
        save_every: int | None = None,
        run: str | None = None,
    ) -> None:
        super().__init__("drill limit", Every(steps=1))
        self._steps, self._seconds, self._save_every, self._run = steps, seconds, save_every, run
        self._opened = 0.0

    def open(self, run: RunView) -> None:
        self._opened = time.monotonic()
        if self._run is not None and located(self._run) != Path(run.run_dir):
            self._steps = self._seconds = self._save_every = None

    def due(self, when: Instant) -> bool:
        return not when.at_epoch_end

    def run(self, boundary: Boundary) -> Outcome | None:
        reached = self._steps is not None and boundary.step >= self._steps
        if boundary.moment is Moment.ENTER_LOOP:
            if reached:  # an earlier start has saved there: no step is left to run
                raise Interrupted(exit_status(0), f"the drill ends at step {boundary.step}")
            return None
        if reached or (self._seconds is not None and time.monotonic() > self._opened + self._seconds):
            return Outcome(actions=(Interrupt(f"the drill ends at step {boundary.step}", 0),))
        if self._save_every is not None and boundary.step % self._save_every == 0:
            return Outcome(actions=(Save(),))
        return None


def drill_limits() -> list[Service]:
    """Make the limit of this run, if the process is being drilled with one."""
    said = os.environ.get(LIMIT)
    settings: dict[str, Any] = json.loads(said) if said else {}
    return [DrillLimit(**settings)] if settings else []
