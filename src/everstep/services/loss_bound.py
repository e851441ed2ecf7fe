"""Guard against a loss above a bound."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any, Literal

from everstep.arguments import integer, number
from everstep.contracts.services import Boundary, Outcome, Stage, Stop
from everstep.errors import ConfigError, LossBoundError
from everstep.metrics import Stats
from everstep.schedule import Every, Schedule
from everstep.services.controller import Controller


class LossBound(Controller):
    """End the run at a loss that is too large (or NaN), before its state is saved.

    The service judges the largest single value since its last look, never a mean.  By default it looks, and
    so waits for the device, after every step.  The memory is part of the checkpoint.

    Args:
        metric: name of the metric.
        bound: the largest value allowed.
        times: the largest value allowed, as a multiple of the median of the last `last` looks (of their
            means, where a look has several values); judged after `last` looks; more than 1.
        last: number of looks for the median, 1 or more.
        policy: "raise" a `LossBoundError`, or "stop": the loop ends as written, exit status 1.
            In both cases the state is not saved and the last good checkpoint stays.
        every: when to look; default `Every(steps=1)`.  A save between two looks is not judged.

    Raises:
        ConfigError: no bound is given, or an argument is out of its range.
    """

    stage = Stage.GUARD
    isolate = False
    default_schedule = Every(steps=1)

    def __init__(
        self,
        metric: str = "loss",
        *,
        bound: float | None = None,
        times: float | None = None,
        last: int = 100,
        policy: Literal["raise", "stop"] = "raise",
        every: Schedule | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name or f"bound of {metric}".replace("/", "."), every)
        if bound is None and times is None:
            raise ConfigError(f"LossBound({metric!r}) has no bound: give bound= or times=")
        if policy not in ("raise", "stop"):
            raise ConfigError(f'LossBound(policy={policy!r}): give "raise" or "stop"')
        times = number("times", times, none="for an absolute bound")
        if times is not None and times <= 1:
            raise ConfigError(
                f"LossBound(times={times!r}): give more than 1: with less, the median itself exceeds the "
                "bound"
            )
        self.metric, self.watches = metric, (metric,)
        self.bound, self.times, self.policy = bound, times, policy
        self.last = integer("last", last)
        self._last: deque[float] = deque(maxlen=self.last)

    def run(self, boundary: Boundary) -> Outcome | None:
        stats = boundary.readings.stats(self.metric)
        boundary.readings.clear()
        if stats is None:
            return None
        broken = self._broken(stats)
        if self.times is not None:  # after the judgement: a value is not part of its own median
            self._last.append(stats.mean)
        if broken is None:
            return None
        how = f"above {broken}" if math.isfinite(stats.max) else "which is not finite"
        message = (
            f"{self.metric} is {stats.max:.6g} at step {boundary.step}, {how}; nothing after the "
            "last checkpoint is saved. Lower the learning rate or look at that step's batch"
        )
        if self.policy == "raise":
            raise LossBoundError(message, step=boundary.step)
        return Outcome(actions=(Stop(message, failed=True, step=boundary.step),))

    def _broken(self, stats: Stats) -> str | None:
        """Describe the bound that the largest value exceeds; None if it exceeds none."""
        if self.bound is not None and not stats.max <= self.bound:
            return f"its bound {self.bound:g}"
        if self.times is not None and not math.isfinite(stats.max):
            return "any bound"  # also while there is no median yet: a NaN would spoil it
        if self.times is not None and len(self._last) == self.last:
            middle = median(self._last)
            if not stats.max <= self.times * middle:
                return f"{self.times:g} times {middle:.6g}, the median of the last {len(self._last)}"
        return None

    def state_dict(self) -> list[float]:
        return list(self._last)

    def load_state_dict(self, state: Any) -> None:
        self._last.clear()
        self._last.extend(state)
