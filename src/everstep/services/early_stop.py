"""Early stop: at a metric that has not improved for a while, or that is good enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from everstep.arguments import integer, number
from everstep.contracts.services import Boundary, Outcome, Stage, Stop
from everstep.contracts.state import Json
from everstep.errors import ConfigError
from everstep.schedule import Every, Schedule
from everstep.services.best import better, direction, latest, reaches
from everstep.services.controller import Controller


class EarlyStop(Controller):
    """Stop the run after a while without a better value, or at a value that is good enough.

    The service judges the metric at its own boundaries (default: each epoch's end): value by value if the
    metric was collected outside steps, by the mean if inside.  The memory is part of the checkpoint.

    Args:
        metric: name of the metric.
        mode: "min" or "max"; None infers the mode for names ending in loss, acc or accuracy.
        patience: stop after n evaluations in a row without improvement, 1 or more.
        patience_steps: stop at the first evaluation n or more steps after the last improvement, 1 or more.
        threshold: stop at the first value that reaches the threshold.
        baseline: only a better value than the baseline counts as an improvement.
        min_delta: an improvement must be larger than this, 0 or more.
        min_steps: no stop before this step, 0 or more.
        every: when to judge; default `Every(epochs=1)`.

    Raises:
        ConfigError: an argument is out of its range, or no reason to stop is given.
    """

    stage = Stage.DECIDE
    isolate = False
    default_schedule = Every(epochs=1)

    def __init__(
        self,
        metric: str,
        mode: str | None = None,
        *,
        patience: int | None = None,
        patience_steps: int | None = None,
        threshold: float | None = None,
        baseline: float | None = None,
        min_delta: float = 0.0,
        min_steps: int = 0,
        every: Schedule | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name or f"early stop {metric}".replace("/", "."), every)
        self.metric, self.watches = metric, (metric,)
        self.patience = integer("patience", patience, none="for no limit")
        self.patience_steps = integer("patience_steps", patience_steps, none="for no limit")
        if patience is None and patience_steps is None and threshold is None:
            raise ConfigError(
                f"EarlyStop({metric!r}) has no reason to stop: give patience=, patience_steps= or threshold="
            )
        self.threshold, self.baseline = threshold, baseline
        self.min_delta = number("min_delta", min_delta, zero=True)
        self.min_steps = integer("min_steps", min_steps, 0)
        self.mode, _ = direction(metric, mode)
        self.best = baseline
        self.waited = 0
        self._improved: int | None = None
        """Step of the last improvement, or of the first value; None before the first value."""

    def run(self, boundary: Boundary) -> Outcome | None:
        values = latest(boundary.readings, self.metric)
        boundary.readings.clear()
        for value in values:
            if self._improved is None:
                self._improved = boundary.step
            if better(value, self.best, self.mode, self.min_delta):
                self.best, self.waited, self._improved = value, 0, boundary.step
            else:
                self.waited += 1
        # the memory is updated before `min_steps` is looked at: early values count for later judgements
        reason = self._reason(values, boundary.step)
        if reason is None or boundary.step < self.min_steps or boundary.stop is not None:
            return None
        return Outcome(actions=(Stop(f"early stop: {self.metric} {reason}"),))

    def _reason(self, values: Sequence[float], step: int) -> str | None:
        if self.threshold is not None:
            for value in values:
                if reaches(value, self.threshold, self.mode):
                    return f"has reached {self.threshold} with {value:.6g}"
        if self.patience is not None and self.waited >= self.patience:
            return f"has not improved on {self.best} for {self.waited} evaluations"
        if self.patience_steps is not None and self._improved is not None:
            steps = step - self._improved
            if steps >= self.patience_steps:
                return f"has not improved on {self.best} for {steps} steps"
        return None

    def state_dict(self) -> dict[str, Json]:
        return {"best": self.best, "waited": self.waited, "improved": self._improved}

    def load_state_dict(self, state: Any) -> None:
        self.best, self.waited = state["best"], state["waited"]
        self._improved = state.get("improved")  # checkpoints of format 3 lack this key
