"""Start of a run that waits for another run's checkpoint."""

from __future__ import annotations

import time
from pathlib import Path

from everstep.arguments import integer, number
from everstep.checkpoint import Store
from everstep.contracts.services import Boundary, Moment, RunView, Service, Stage
from everstep.errors import ServiceError
from everstep.record import user_path


class GlobalStepWaiter(Service):
    """Wait, before the loop begins, until another run has a checkpoint of a step, or of a later step.

    A signal ends the waiting: the run then begins, and is interrupted at its first boundary.

    Args:
        run_dir: the other run's directory, which need not exist yet.
        step: the step, 1 or more.
        poll: seconds between two looks.
        timeout: seconds after which the waiting is an error; None to wait for ever.

    Raises:
        ConfigError: an argument is out of its range.
        ServiceError: the timeout is over.
    """

    stage = Stage.GUARD
    moments = frozenset({Moment.ENTER_LOOP})
    isolate = False
    window = "none"

    def __init__(
        self,
        run_dir: str | Path,
        step: int,
        *,
        poll: float = 1.0,
        timeout: float | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name or "global step waiter")
        self.run_dir = user_path(run_dir, "run_dir")
        self.step = integer("step", step)
        self.poll = number("poll", poll, of="seconds")
        self.timeout = number("timeout", timeout, of="seconds", none="to wait for ever")
        self._run: RunView
        """Set while the loop is open."""

    def open(self, run: RunView) -> None:
        self._run = run

    def run(self, boundary: Boundary) -> None:
        if self._newest() >= self.step:
            return
        self._run.println(f"waiting until the run in {self.run_dir} has a checkpoint of step {self.step}")
        began = time.monotonic()
        while (newest := self._newest()) < self.step and not self._run.interrupted:
            if self.timeout is not None and time.monotonic() - began >= self.timeout:
                raise ServiceError(
                    f"in {self.timeout:g} s the run in {self.run_dir} has come to step {newest}, not to "
                    f"step {self.step}; look at that run, or give a longer timeout="
                )
            time.sleep(self.poll)

    def _newest(self) -> int:
        names = Store(self.run_dir).names()
        return names[-1].step if names else 0
