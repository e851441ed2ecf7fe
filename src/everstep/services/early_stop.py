"""Stop when a metric has not improved for a while."""

from __future__ import annotations

from typing import Any

from everstep.contracts import Boundary, Json, Outcome, Service, Stage, Stop
from everstep.keywords import number, whole
from everstep.schedule import Every, Schedule
from everstep.services.best import better, direction, latest


class EarlyStop(Service):
    """Stops the run after `patience` evaluations in a row without a better value.

    It judges the metric at its own boundaries (default: each epoch's end), value by value if it was
    collected outside steps, by the mean if inside.  Its memory is part of the checkpoint.

    Args:
        metric: its name.
        mode: "min" or "max"; None infers it for names ending in loss, acc or accuracy.
        patience: evaluations without improvement before the stop, 1 or more.
        min_delta: a smaller improvement counts as none, 0 or more.
        min_steps: no stop before this step, 0 or more.
        every: when to judge; default `Every(epochs=1)`.

    Raises:
        ConfigError: an argument is out of its range.
    """

    stage = Stage.DECIDE
    controller = True
    isolate = False

    def __init__(
        self,
        metric: str,
        mode: str | None = None,
        *,
        patience: int,
        min_delta: float = 0.0,
        min_steps: int = 0,
        every: Schedule | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            name or f"early stop {metric}".replace("/", "."), Every(epochs=1) if every is None else every
        )
        self.metric, self.watches = metric, (metric,)
        self.patience = whole("patience", patience)
        self.min_delta = number("min_delta", min_delta, zero=True)
        self.min_steps = whole("min_steps", min_steps, 0)
        self.mode, _ = direction(metric, mode)
        self.best: float | None = None
        self.waited = 0

    def config(self) -> Json:
        return {
            "metric": self.metric,
            "mode": self.mode,
            "patience": self.patience,
            "min_delta": self.min_delta,
            "min_steps": self.min_steps,
            "every": repr(self.schedule),
        }

    def run(self, boundary: Boundary) -> Outcome | None:
        for value in latest(boundary.readings, self.metric):
            if better(value, self.best, self.mode, self.min_delta):
                self.best, self.waited = value, 0
            else:
                self.waited += 1
        boundary.readings.clear()
        if self.waited < self.patience or boundary.step < self.min_steps or boundary.stop is not None:
            return None
        reason = f"early stop: {self.metric} has not improved on {self.best} for {self.waited} evaluations"
        return Outcome(actions=(Stop(reason),))

    def state_dict(self) -> dict[str, Json]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Any) -> None:
        self.best, self.waited = state["best"], state["waited"]
