"""Requirement on a metric, for tests of a training: it reaches a value in time, or the process fails."""

from __future__ import annotations

from typing import Any

from everstep.arguments import integer
from everstep.contracts.services import Boundary, Moment, Outcome, RunView, Stage, Stop
from everstep.contracts.state import Json
from everstep.errors import ConfigError, GuardStop
from everstep.schedule import At, Every, Schedule
from everstep.services.best import Mode, better, direction, latest, reaches
from everstep.services.controller import Controller

NOT_MET = 4
"""Exit status of a run that does not meet a requirement."""


class Require(Controller):
    """End the run with exit status 4 where a metric has not reached a value by a step or an epoch.

    The loop ends as written and its state is saved; a new start ends in the same way, until the requirement
    is changed or taken away.  A run that ends before the deadline fails, too; the record has the run's own
    reason for the end, and with a raised limit the run continues.  To stop as soon as the value is reached,
    add `EarlyStop(..., threshold=)`.

    Args:
        metric: name of the metric.
        value: the value that the metric must reach at least once.
        mode: "min" or "max"; None infers the mode for names ending in loss, acc or accuracy.
        step, epoch: the deadline; exactly one of them, 1 or more.
        every: when to look; default each epoch.  A metric from outside steps is judged value by value, a
            metric from inside steps by its mean since the last look.

    Raises:
        ConfigError: an argument is out of its range, or not exactly one deadline is given.
    """

    stage = Stage.DECIDE
    isolate = False
    default_schedule = Every(epochs=1)
    moments = frozenset({Moment.AFTER_STEP, Moment.AFTER_EPOCH, Moment.EXIT_LOOP})

    def __init__(
        self,
        metric: str,
        value: float,
        mode: str | None = None,
        *,
        step: int | None = None,
        epoch: int | None = None,
        every: Schedule | None = None,
        name: str | None = None,
    ) -> None:
        if (step is None) == (epoch is None):
            raise ConfigError(f"Require({metric!r}) needs one deadline: give step= or epoch=")
        step = integer("step", step, none="for a deadline in epochs")
        epoch = integer("epoch", epoch, none="for a deadline in steps")
        deadline = Every(epochs=epoch) if step is None else At(step)
        super().__init__(
            name or f"require {metric}".replace("/", "."),
            deadline | (self.default_schedule if every is None else every),
        )
        self.metric, self.watches, self.value = metric, (metric,), value
        self.mode: Mode
        self.mode, _ = direction(metric, mode)
        self.step, self.epoch = step, epoch
        self.best: float | None = None
        self._run: RunView
        """Set while the loop is open."""

    def open(self, run: RunView) -> None:
        self._run = run

    def run(self, boundary: Boundary) -> Outcome | None:
        for value in latest(boundary.readings, self.metric):
            if better(value, self.best, self.mode):
                self.best = value
        boundary.readings.clear()
        if self.best is not None and reaches(self.best, self.value, self.mode):
            return None
        # judged after the loop, whose last boundary may have brought the value
        if boundary.moment is Moment.EXIT_LOOP:
            self._judge_end(boundary)
        elif self._is_late(boundary):
            by = f"step {self.step}" if self.epoch is None else f"epoch {self.epoch}"
            return Outcome(actions=(Stop(f"{self._unmet} by {by}, {self._found}", code=NOT_MET),))
        return None

    def _judge_end(self, boundary: Boundary) -> None:
        """Fail a run that is over and that this requirement did not stop: it will not reach the value."""
        ending = boundary.payload
        if ending.finished and not ending.reason.startswith(self._unmet):
            reason = f"{self._unmet}, {self._found} ({ending.reason})"
            self._run.println(reason)
            raise GuardStop(NOT_MET, reason)

    @property
    def _unmet(self) -> str:
        return f"requirement not met: {self.metric} has not reached {self.value}"

    @property
    def _found(self) -> str:
        return "it has no value" if self.best is None else f"its best is {self.best:.6g}"

    def _is_late(self, boundary: Boundary) -> bool:
        if self.epoch is None:
            assert self.step is not None
            return boundary.step >= self.step
        return boundary.moment is Moment.AFTER_EPOCH and boundary.epoch >= self.epoch

    def state_dict(self) -> dict[str, Json]:
        return {"best": self.best}

    def load_state_dict(self, state: Any) -> None:
        self.best = state["best"]
