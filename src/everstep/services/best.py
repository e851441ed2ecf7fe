"""Best value of a metric, and the weights that reached it."""

from __future__ import annotations

import math
from typing import Any, Literal, cast

from everstep.contracts import Boundary, Json, Outcome, Readings, RunView, SaveBest, Service, Stage
from everstep.errors import ConfigError
from everstep.schedule import Every, Schedule

Mode = Literal["min", "max"]


def direction(
    metric: str, mode: str | None, remedy: str = 'give mode="min" or mode="max"'
) -> tuple[Mode, bool]:
    """Which way `metric` is better, and whether that was inferred from its name.

    Args:
        remedy: what to do where it cannot be.

    Raises:
        ConfigError: `mode` is neither "min" nor "max", or it is None and the name does not tell.
    """
    if mode in ("min", "max"):
        return cast(Mode, mode), False
    if mode is not None:
        raise ConfigError(f'mode {mode!r} of metric {metric!r}: give "min" or "max"')
    last = metric.replace("/", "_").replace(" ", "_").rpartition("_")[2]
    if last == "loss":
        return "min", True
    if last in ("acc", "accuracy"):
        return "max", True
    raise ConfigError(
        f"whether a smaller or a larger {metric!r} is better cannot be told from its name; {remedy}"
    )


def better(value: float, best: float | None, mode: Mode, min_delta: float = 0.0) -> bool:
    """Whether `value` beats `best` by more than `min_delta`; NaN and infinities never do."""
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    return value < best - min_delta if mode == "min" else value > best + min_delta


def reaches(value: float, goal: float, mode: Mode) -> bool:
    """Whether `value` is `goal` or better; NaN and infinities never are."""
    return math.isfinite(value) and (value <= goal if mode == "min" else value >= goal)


def latest(readings: Readings, metric: str) -> list[float]:
    """What a deciding service judges: each value collected outside steps, else the steps' mean."""
    if values := readings.values(metric):
        return values
    stats = readings.stats(metric)
    return [] if stats is None else [stats.mean]


class Best(Service):
    """Tracks the best value of a metric and keeps the user state that reached it in `best/METRIC/`.

    A value collected outside steps (an evaluation) is compared at once, and counts for the weights
    of the boundary that follows.  A metric collected only inside steps is judged by its mean at the
    service's boundary.

    Args:
        metric: its name.
        mode: "min" or "max"; None infers it for names ending in loss, acc or accuracy, and says so.
        save: whether to keep the weights on disk.
        restore_at_end: after a clean end, when the last state is committed, load the best weights
            into the live objects (the checkpoints keep the last state).
        every: when the steps' mean is judged; default each epoch.
    """

    stage = Stage.SAVE
    isolate = False

    def __init__(
        self,
        metric: str,
        mode: str | None = None,
        *,
        save: bool = True,
        restore_at_end: bool = False,
        every: Schedule | None = None,
    ) -> None:
        super().__init__(f"best {metric}".replace("/", "."), Every(epochs=1) if every is None else every)
        self.metric, self.watches = metric, (metric,)
        self.mode, self._inferred = direction(metric, mode)
        self.save, self.restore_at_end = save, restore_at_end
        self.value: float | None = None
        self.step = self.epoch = 0
        self.is_new = False
        """Whether a best came since the last printed line (the mark ` (*)`)."""
        self.saved_as: str | None = None
        """Name of the folder in `best/METRIC/` with the best weights; the supervisor sets it."""
        self._unsaved = False
        self._run: RunView | None = None

    def open(self, run: RunView) -> None:
        self._run = run
        run.watch(self.metric, self._seen)

    def _seen(self, value: float) -> None:
        assert self._run is not None
        if self._inferred and self.value is None:
            self._inferred = False
            word = "smaller" if self.mode == "min" else "larger"
            self._run.println(f"best {self.metric}: {word} is better (inferred from its name)")
        if better(value, self.value, self.mode):
            self.value, self.step, self.epoch = value, self._run.step, self._run.epoch
            self.is_new = self._unsaved = True
            self.saved_as = None  # until these weights are kept, too

    def run(self, boundary: Boundary) -> Outcome | None:
        if not boundary.readings.values(self.metric):
            for value in latest(boundary.readings, self.metric):
                self._seen(value)
        boundary.readings.clear()
        if not self._unsaved:
            return None
        self._unsaved = False
        if not self.save:
            return None
        assert self.value is not None and self._run is not None
        if self.step != boundary.step:
            self._run.println(
                f"the best {self.metric} ({self.value:.6g}) was measured at step {self.step} and its weights "
                f"were trained on until step {boundary.step}: they are not kept; measure after the last step"
            )
            return None
        return Outcome(actions=(SaveBest(self.metric, self.value),))

    def state_dict(self) -> dict[str, Json]:
        return {
            "value": self.value,
            "step": self.step,
            "epoch": self.epoch,
            "saved_as": self.saved_as,
            "unsaved": self._unsaved,
        }

    def load_state_dict(self, state: Any) -> None:
        self.value, self.step, self.epoch = state["value"], state["step"], state["epoch"]
        self.saved_as, self._unsaved = state["saved_as"], state["unsaved"]
