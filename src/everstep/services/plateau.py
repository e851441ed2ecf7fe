"""Action when a metric has stopped improving: lower the learning rate, or stop."""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean
from typing import Any

from everstep.arguments import integer
from everstep.contracts.services import Boundary, Outcome, RunView, SetValue, Stage, Stop
from everstep.contracts.state import Json
from everstep.errors import ConfigError
from everstep.schedule import Every, Schedule
from everstep.services.best import better, direction, latest
from everstep.services.controller import Controller


class Plateau(Controller):
    """Act where the mean of a metric's last `short` values is not better than the mean of the last `long`.

        Plateau("valid_loss", then=SetValue("optimizer.lr", times=0.1, least=1e-6))

    The service judges like `EarlyStop`, at its own boundaries (default: each epoch's end): value by value if
    the metric was collected outside steps, by the mean if inside.  NaN and infinities are passed over.  The
    memory is part of the checkpoint.  A scheduler of the state that computes the learning rate anew would
    undo the change: take one of the two.

    Args:
        metric: name of the metric.
        mode: "min" or "max"; None infers the mode for names ending in loss, acc or accuracy.
        then: `SetValue` or `Stop`.
        long: number of values in the long mean; with fewer values nothing is judged.
        short: number of values in the short mean, 1 or more and less than `long`.
        cooldown: number of values after an action that cannot cause the next; default `long`.
        every: when to judge; default `Every(epochs=1)`.

    Raises:
        ConfigError: an argument is out of its range.
    """

    stage = Stage.DECIDE
    isolate = False
    default_schedule = Every(epochs=1)

    def __init__(
        self,
        metric: str,
        mode: str | None = None,
        *,
        then: SetValue | Stop,
        long: int = 50,
        short: int = 10,
        cooldown: int | None = None,
        every: Schedule | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name or f"plateau of {metric}".replace("/", "."), every)
        if not isinstance(then, SetValue | Stop):
            raise ConfigError(f"Plateau(then={then!r}): give SetValue(...) or Stop(...)")
        self.long, self.short = integer("long", long), integer("short", short)
        if self.short >= self.long:
            raise ConfigError(f"Plateau(long={long}, short={short}): give a long that is larger than short")
        self.metric, self.watches, self.then = metric, (metric,), then
        self.sets = (then.target,) if isinstance(then, SetValue) else ()
        # raises here, before a training begins, if the name does not tell the direction
        self.mode, _ = direction(metric, mode)
        self.cooldown = self.long if cooldown is None else integer("cooldown", cooldown, 0)
        self._values: deque[float] = deque(maxlen=self.long)
        self._resting = 0
        self._run: RunView
        """Set while the loop is open."""

    def open(self, run: RunView) -> None:
        self._run = run

    def run(self, boundary: Boundary) -> Outcome | None:
        found = False
        for value in latest(boundary.readings, self.metric):
            if math.isfinite(value):
                self._values.append(value)
                # before `or found`: each value must count down the cooldown, also after a plateau
                found = self._is_plateau() or found
        boundary.readings.clear()
        if not found:
            return None
        self._run.println(f"plateau of {self.metric} at step {boundary.step}: {self.then}")
        return Outcome(actions=(self.then,))

    def _is_plateau(self) -> bool:
        if self._resting:
            self._resting -= 1
            return False
        values = list(self._values)
        if len(values) < self.long:
            return False
        if better(fmean(values[-self.short :]), fmean(values), self.mode):
            return False
        self._resting = self.cooldown
        return True

    def state_dict(self) -> dict[str, Json]:
        return {"values": list(self._values), "resting": self._resting}

    def load_state_dict(self, state: Any) -> None:
        self._values.clear()
        self._values.extend(state["values"])
        self._resting = state["resting"]
