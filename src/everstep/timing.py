"""Timing of a run: its progress, the time that is left, and where the seconds of a start went.

The rate of steps is measured over a recent time and without evaluations, so that neither a slow start nor a
long validation makes the ETA jump.  The time of future evaluations is estimated from that of past ones.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from everstep.contracts.services import Clock


def progress(
    step: int,
    epoch: int,
    max_step: int | None,
    max_epoch: int | None,
    *,
    steps_per_epoch: float | None = None,
    within_epoch: bool = False,
    within_step: bool = False,
) -> float | None:
    """Return the part of the run that is done, 0 to 1; None if the run is unbounded.

    An epoch or a step that is still open (`within_epoch`, `within_step`) is not done.
    """
    steps = step - within_step
    parts = []
    if max_step is not None:
        parts.append(steps / max_step)
    if max_epoch is not None and steps_per_epoch:
        parts.append(steps / (max_epoch * steps_per_epoch))
    elif max_epoch is not None:
        parts.append((epoch - within_epoch) / max_epoch)
    # the limit that is reached first ends the run
    return min(max(*parts, 0.0), 1.0) if parts else None


class _Sample(NamedTuple):
    step: int
    seconds: float  # of training since the start, evaluations not counted


class Estimator:
    """Estimate of the time that is left, by the rate over the later half of the training since `start`.

    `update` and `exclude` belong to one thread; `eta` and `rate` may be called from any thread.
    """

    SAMPLES = 128
    """Limit on the number of samples that are kept, however often `update` is called."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.start(0)

    def start(self, step: int) -> None:
        """Begin the measurement after a completed step: the time before tells nothing about the rate."""
        self._began = self._clock()
        self._excluded = 0.0
        self._excluded_steps = 0  # steps done when `_excluded` last grew
        self._first = step
        self._samples = deque([_Sample(step, 0.0)])

    def update(self, step: int) -> None:
        """Note that a step is completed; called at boundaries, as often or seldom as they come."""
        samples = self._samples
        if step == samples[-1].step:
            return
        sample = _Sample(step, self.trained)
        if len(samples) > 2 and samples[-1].seconds - samples[-2].seconds < sample.seconds / self.SAMPLES:
            samples[-1] = sample
        else:
            samples.append(sample)
        while len(samples) > 2 and samples[1].seconds <= sample.seconds / 2:
            samples.popleft()

    def exclude(self, seconds: float) -> None:
        """Count the seconds that just passed as evaluation, not training; `update` was called before them."""
        self._excluded += seconds
        self._excluded_steps = self._samples[-1].step - self._first

    @property
    def trained(self) -> float:
        """Seconds since the start, without those that were excluded."""
        return self._clock() - self._began - self._excluded

    def rate(self) -> float | None:
        """Return steps per second of training over the recent time; None before the first step."""
        first, last = self._samples[0], self._samples[-1]
        seconds = last.seconds - first.seconds
        return (last.step - first.step) / seconds if seconds > 0 and last.step > first.step else None

    def eta(self, step: int, progress: float | None) -> float | None:
        """Return the seconds until the run ends, of which `progress` is done; None if nobody knows."""
        rate = self.rate()
        if progress is None or progress <= 0 or rate is None:
            return None
        last = self._samples[-1]
        remaining = step / progress - last.step
        per_step = 1 / rate
        if self._excluded_steps > 0:
            per_step += self._excluded / self._excluded_steps
        return max(remaining * per_step - (self.trained - last.seconds), 0.0)


class TimeSpent:
    """Seconds since the loop was entered, by what they were spent on."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = 0.0
        self._evaluation = self._services = 0.0
        self._boundary: float | None = None
        """Clock time at which the current boundary began; None between boundaries."""

    def begin(self) -> None:
        self._began = self._clock()

    @property
    def seconds(self) -> float:
        return self._clock() - self._began

    @property
    def at_boundary(self) -> bool:
        return self._boundary is not None

    def begin_boundary(self) -> None:
        """Count the time from here on as that of services."""
        self._boundary = self._clock()

    def end_boundary(self) -> None:
        assert self._boundary is not None
        self._services += self._clock() - self._boundary
        self._boundary = None

    def in_steps(self, seconds: float) -> None:
        """Count seconds of this boundary as time of steps."""
        self._services -= seconds

    def in_evaluation(self, seconds: float) -> None:
        """Count seconds as evaluation, by a service or by the program."""
        self._evaluation += seconds
        if self.at_boundary:
            self._services -= seconds

    def parts(self, data: float) -> dict[str, float]:
        """Return the seconds by part; `data` are the seconds spent waiting for batches."""
        now = self._clock()
        open_boundary = 0.0 if self._boundary is None else now - self._boundary
        parts = {"data": data, "evaluation": self._evaluation, "services": self._services + open_boundary}
        return {**parts, "step": now - self._began - sum(parts.values())}
