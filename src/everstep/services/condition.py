"""Conditions for actions: a schedule, a new best value of a metric, or a function of the boundary."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

from everstep.arguments import checked_keywords
from everstep.backends.describe_values import described
from everstep.contracts.services import Boundary, RunView
from everstep.contracts.state import Json
from everstep.errors import ConfigError
from everstep.schedule import Every, Schedule
from everstep.services.best import Best, direction


class OnBest:
    """Condition: a metric has a new best value.

    Values count for weights as in `Best`, and NaN and ties are treated as there.  The best value so far is
    part of the checkpoint: after a restart, no worse value is a new best.

    Args:
        metric: name of the metric.
        mode: "min" or "max"; None infers the mode for names ending in loss, acc or accuracy.

    Raises:
        ConfigError: as `Best`.
    """

    @checked_keywords
    def __init__(self, metric: str, mode: str | None = None) -> None:
        self.metric, (self.mode, _) = metric, direction(metric, mode)

    def __repr__(self) -> str:
        return f"OnBest({self.metric!r}, {self.mode!r})"


Condition: TypeAlias = Schedule | OnBest | Callable[[Boundary], Any]


class Trigger:
    """Condition, for the service that acts under it.

    Args:
        condition: the user's argument.
        every: when to ask, unless the condition is a schedule; default each epoch.

    Raises:
        ConfigError: the argument is not a condition, or `every` does not go with it.
    """

    def __init__(self, condition: Condition, every: Schedule | None) -> None:
        if not (isinstance(condition, Schedule | OnBest) or callable(condition)):
            raise ConfigError(
                f"{condition!r} is not a condition; give a schedule such as Every(epochs=1), "
                'OnBest("valid_loss"), or a function of the boundary'
            )
        self._condition = condition
        known = isinstance(condition, Schedule | OnBest)
        self.described: Json = repr(condition) if known else described(condition, "condition")
        """Description of the condition, for comparison on resume."""
        self._best: Best | None = None
        if isinstance(condition, Schedule):
            if every is not None:
                raise ConfigError(
                    f"every={every!r} beside {condition!r}: a schedule says by itself when it is due; leave "
                    "out every="
                )
            self.schedule = condition
            return
        self.schedule = Every(epochs=1) if every is None else every
        if isinstance(condition, OnBest):
            if isinstance(every, Schedule) and every.wall:
                raise ConfigError(
                    f"every={every!r} with {condition!r}: a best value is judged by steps or epochs; give a "
                    "schedule of those"
                )
            self._best = Best(condition.metric, condition.mode, save=False)

    @property
    def watches(self) -> tuple[str, ...]:
        """Metrics that the condition waits for."""
        return () if self._best is None else (self._best.metric,)

    @property
    def name(self) -> str:
        """Name of the condition, for names of services; the same in every process."""
        text = str(getattr(self._condition, "__name__", self))
        return re.sub(r"\w+=None, |, \w+=None", "", text).replace("/", ".")

    def __str__(self) -> str:
        return self.described if isinstance(self.described, str) else "a function"

    def open(self, run: RunView) -> None:
        """Open the condition, as `Service.open`."""
        if self._best is not None:
            self._best.open(run)

    def asked(self, boundary: Boundary) -> int | None:
        """Return the step whose state meets the condition, else None; called where the service is due."""
        if self._best is not None:
            place = self._best.look(boundary)
            return None if place is None else place.step
        if isinstance(self._condition, Schedule):
            return boundary.step
        assert callable(self._condition)
        return boundary.step if self._condition(boundary) else None

    def state_dict(self) -> Any:
        """Return the condition's state, as `Service.state_dict`."""
        return None if self._best is None else self._best.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Restore the condition's state, as `Service.load_state_dict`."""
        if self._best is not None and state is not None:
            self._best.load_state_dict(state)
