"""Limit of a run: a number of steps or epochs, or a time budget."""

from __future__ import annotations

from everstep.arguments import plain
from everstep.contracts.services import Boundary, Interrupt, Moment, Outcome, RunView, Stage, Stop
from everstep.contracts.state import Json
from everstep.errors import ConfigError
from everstep.schedule import At, Every, Instant, Schedule
from everstep.services.controller import Controller


class StopAfter(Controller):
    """End the run at a limit; the first limit reached wins.

    Steps and epochs are totals of the run; these limits end the iterators, so the loop ends as written.
    Seconds count from this start of the process; this limit interrupts: the state is saved at the next
    boundary and the process ends with exit status 3, to be started again.

    Args:
        steps, epochs: positive integers.
        seconds: a positive number.

    Raises:
        ConfigError: no limit is given, or a limit is not positive.
    """

    stage = Stage.DECIDE
    isolate = False
    window = "none"

    def __init__(
        self,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        seconds: float | None = None,
        name: str = "stop_after",
    ) -> None:
        steps, epochs, seconds = plain(steps), plain(epochs), plain(seconds)
        schedules: list[Schedule] = []
        if steps is not None:
            schedules.append(At(steps))
        if epochs is not None:
            schedules.append(Every(epochs=epochs))
        if seconds is not None:
            schedules.append(Every(seconds=seconds))
        if not schedules:
            raise ConfigError("StopAfter() needs a limit: give steps=, epochs= or seconds=")
        schedule = schedules[0]
        for other in schedules[1:]:
            schedule = schedule | other
        super().__init__(name, schedule)
        self.steps, self.epochs, self.seconds = steps, epochs, seconds
        self._run: RunView | None = None
        self._ends: float | None = None
        """The clock's time at which the budget is used up; None without one."""
        self._now = 0.0

    def config(self) -> Json:
        if self.steps is None and self.epochs is None:
            return None  # a time budget does not change training, only the time of the next start
        return {"steps": self.steps, "epochs": self.epochs}

    def due(self, when: Instant) -> bool:
        self._now = when.now  # of several ranks the writer's: all decide alike
        return super().due(when) or (self.steps is not None and when.step >= self.steps)

    def open(self, run: RunView) -> None:
        # by the schedule, which began before other services were opened: both end at the same instant
        self._run, self._ends = run, self.schedule.next_time()

    def run(self, boundary: Boundary) -> Outcome | None:
        assert self._run is not None
        if self.steps is not None and boundary.step >= self.steps:
            return Outcome(actions=(Stop(f"stop after {self.steps} steps"),))
        at_epoch_end = boundary.moment is Moment.AFTER_EPOCH
        if self.epochs is not None and at_epoch_end and boundary.epoch >= self.epochs:
            return Outcome(actions=(Stop(f"stop after {self.epochs} epochs"),))
        late = self._late(self._now)
        return None if late is None else Outcome(actions=(late,))

    def overtime(self) -> Interrupt | None:
        """Return an interrupt if the time is used up by now, else None."""
        return None if self._run is None else self._late(self._run.clock())

    def _late(self, now: float) -> Interrupt | None:
        if self._ends is None or now < self._ends:
            return None
        return Interrupt(f"time budget of {self.seconds:g} s is used up")
