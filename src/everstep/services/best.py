"""Metrics by name, which of two values is better, the best so far, and the weights that reached it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

from everstep.arguments import integer
from everstep.contracts.metrics import better_when
from everstep.contracts.services import Boundary, Outcome, Readings, RunView, SaveBest, Service, Stage
from everstep.contracts.state import Json
from everstep.errors import ConfigError
from everstep.schedule import Every, Schedule

Mode = Literal["min", "max"]


def name_patterns(service: str, metrics: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Check names or patterns of metrics; return all of them, and those that are names."""
    if isinstance(metrics, str):
        raise ConfigError(f"{service}(metrics={metrics!r}): give a list of names, [{metrics!r}]")
    metrics = tuple(metrics)
    for metric in metrics:
        if not isinstance(metric, str):
            raise ConfigError(f"{service}(metrics=): {metric!r} is not the name of a metric; give names")
    return metrics, tuple(metric for metric in metrics if not set("*?[") & set(metric))


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def direction(
    metric: str, mode: str | None, remedy: str = 'give mode="min" or mode="max"'
) -> tuple[Mode, bool]:
    """Find in which direction `metric` is better, and whether the name alone tells."""
    if not isinstance(metric, str):
        raise ConfigError(f"metric={metric!r}: give the name of a metric")
    if mode in ("min", "max"):
        return cast(Mode, mode), False
    if mode is not None:
        raise ConfigError(f'mode {mode!r} of metric {metric!r}: give "min" or "max"')
    if (inferred := better_when(metric)) is not None:
        return inferred, True
    raise ConfigError(f"the name does not tell whether a smaller or a larger {metric!r} is better; {remedy}")


def better(value: float, best: float | None, mode: str | None, min_delta: float = 0.0) -> bool:
    """Whether `value` beats `best` by more than `min_delta`; NaN and infinities never beat it."""
    if best is None or not math.isfinite(value):
        return math.isfinite(value)
    return value < best - min_delta if mode == "min" else value > best + min_delta


def reaches(value: float, goal: float, mode: str | None) -> bool:
    """Whether `value` is `goal` or better; NaN and infinities never count."""
    return math.isfinite(value) and (value <= goal if mode == "min" else value >= goal)


def latest(readings: Readings, metric: str) -> list[float]:
    """Return the values that a deciding service judges: those from outside steps, else the steps' mean."""
    stats = readings.stats(metric)
    return readings.values(metric) or ([] if stats is None else [stats.mean])


@dataclass
class Place:
    """Place among the best values; `name` is the name of the folder with its weights, once they are kept."""

    value: float
    step: int
    epoch: int
    name: str | None = None


class Best(Service):
    """Track the best values of a metric, and keep the user state that reached them in `best/METRIC/`.

    A value collected outside steps (an evaluation) is compared at once, and counts for the weights
    of the boundary that follows; after each `Evaluate` is one.  A metric collected only inside steps is
    judged by its mean at the service's boundary.  NaN and infinities are never best; of equal values the
    earlier one is.

    Args:
        metric: name of the metric.
        mode: "min" or "max"; None infers the mode for names ending in loss, acc or accuracy, and says so.
        save: whether to keep the weights on disk.
        keep: number of best weights to keep, 1 or more; `everstep.runs.best` and `loop.best` are the first.
        restore_at_end: after a clean end, load the best weights into the live objects (the checkpoints keep
            the last state); if they are lost, the next best that are kept, with a warning.  A list of
            entries of the state: load only these.
        every: when the steps' mean is judged; default each epoch.  The best of an evaluation is kept in any
            case: evaluate less often to write less.

    Attributes:
        places: the best values, the best first, one for each step, with their weights if they are kept.
        part: entries of the state that are restored; None for all.
    """

    stage = Stage.SAVE
    isolate = False
    default_schedule = Every(epochs=1)

    def __init__(
        self,
        metric: str,
        mode: str | None = None,
        *,
        save: bool = True,
        keep: int = 1,
        restore_at_end: bool | Sequence[str] = False,
        every: Schedule | None = None,
    ) -> None:
        super().__init__(f"best {metric}".replace("/", "."), every)
        self.metric, self.watches = metric, (metric,)
        self.mode, self._inferred = direction(metric, mode)
        self.save, self.keep = save, integer("keep", keep)
        self.restore_at_end = restore_at_end is not False
        self.part: tuple[str, ...] | None = None
        if not isinstance(restore_at_end, bool):
            self.part = tuple(restore_at_end) if isinstance(restore_at_end, list | tuple) else ()
            if not self.part or not all(isinstance(name, str) for name in self.part):
                raise ConfigError(
                    f"restore_at_end={restore_at_end!r}: give True, or a list of entries of the state, as in "
                    'restore_at_end=["model"]'
                )
        self.places: list[Place] = []
        self._is_new = False
        """Whether a new best value came outside steps since the last printed line."""
        self.measured: int | None = None
        """Step of a value that has a place and no weights yet."""

    @property
    def value(self) -> float | None:
        """Best value so far; None before the first."""
        return self.places[0].value if self.places else None

    def _kept_names(self) -> list[str]:
        return [place.name for place in self.places if place.name is not None]

    def best_to_keep(self) -> dict[str, list[str]]:
        return {self.metric: self._kept_names()} if self._kept_names() else {}

    def config(self) -> Json:
        return {"metric": self.metric, "mode": self.mode}

    def open(self, run: RunView) -> None:
        self._run = run
        run.watch(self.metric, self._take_reading)

    def is_on_line(self, readings: Readings) -> bool:
        """Whether a line of these readings shows a new best value (the mark ` (*)`); called once per line.

        The mean of steps is judged at a boundary that follows the line; here it is only compared.
        """
        stats, values = readings.stats(self.metric), readings.values(self.metric)
        if stats is None:
            return False
        is_new, self._is_new = self._is_new, False
        return is_new and self.value in values if values else better(stats.mean, self.value, self.mode)

    def _take_reading(self, value: float) -> None:
        self._is_new = self._is_new or better(value, self.value, self.mode)
        self._rank_value(value)

    def _rank_value(self, value: float) -> None:
        if self._inferred and not self.places:
            self._inferred = False
            relation = "smaller" if self.mode == "min" else "larger"
            self._run.println(f"best {self.metric}: {relation} is better (inferred from its name)")
        if not math.isfinite(value):
            return
        new, sign = Place(value, self._run.step, self._run.epoch), 1 if self.mode == "min" else -1
        of_steps: dict[int, Place] = {}
        # the sort is stable: of equal values the earlier stays the best; those of one step share a place
        for place in sorted([*self.places, new], key=lambda place: sign * place.value):
            of_steps.setdefault(place.step, place)
        self.places = list(of_steps.values())[: self.keep]
        if any(place is new for place in self.places):
            self.measured = new.step

    def place_at(self, boundary: Boundary) -> Place | None:
        """Find the place of the values since the last look; None if none of them is among the best."""
        if not boundary.readings.values(self.metric):
            for value in latest(boundary.readings, self.metric):
                self._rank_value(value)
        step, self.measured = self.measured, None
        return next((place for place in self.places if place.step == step), None)

    def has_weights(self, place: Place, boundary: Boundary, action: str) -> bool:
        """Whether the weights are those of the best value; else print why `action` is left out."""
        if place.step == boundary.step:
            return True
        self._run.println(
            f"the best {self.metric} ({place.value:.6g}) was measured at step {place.step} and its weights "
            f"were trained on until step {boundary.step}: they are not {action}; measure after the last step"
        )
        return False

    def run(self, boundary: Boundary) -> Outcome | None:
        place = self.place_at(boundary)
        boundary.readings.clear()
        if place is None or not self.save or not self.has_weights(place, boundary, "kept"):
            return None
        return Outcome(actions=(SaveBest(self.metric, place.value, tuple(self._kept_names())),))

    def keep_as(self, name: str, step: int) -> None:
        """Note that the weights of the value at `step` are kept under this name."""
        for place in self.places:
            if place.step == step:
                place.name = name

    def not_kept(self, name: str) -> None:
        """Note that weights which were to be kept under this name are not: their save has failed."""
        for place in self.places:
            if place.name == name:
                place.name = None

    def state_dict(self) -> dict[str, Json]:
        return {"top": [list(vars(place).values()) for place in self.places], "waiting": self.measured}

    def load_state_dict(self, state: Any) -> None:
        self.places = [Place(*place) for place in state["top"][: self.keep]]
        self.measured = state["waiting"]
