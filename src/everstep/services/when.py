"""Conditions for actions: a schedule, a new best value of a metric, or a function of the boundary."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from everstep.arguments import checked_keywords
from everstep.backends.describe_values import described
from everstep.contracts.services import (
    SCHEDULED,
    Action,
    Boundary,
    Interrupt,
    Moment,
    Outcome,
    RunView,
    Save,
    Service,
    ServiceFunction,
    SetValue,
    Stage,
    Stop,
)
from everstep.contracts.state import Json
from everstep.errors import ConfigError, UsageError
from everstep.schedule import Every, Schedule
from everstep.services.best import Best, direction


class OnBest:
    """Condition: a metric has a new best value, judged as in `Best`.

    The best value so far is part of the checkpoint: after a restart, no worse value is a new best.

    Args:
        metric: name of the metric.
        mode: "min" or "max"; None infers the mode for names ending in loss, acc or accuracy.
    """

    @checked_keywords
    def __init__(self, metric: str, mode: str | None = None) -> None:
        self.metric, (self.mode, _) = metric, direction(metric, mode)

    def __repr__(self) -> str:
        return f"OnBest({self.metric!r}, {self.mode!r})"


Condition: TypeAlias = Schedule | OnBest | Callable[[Boundary], Any]


class Conditional(Service):
    """Service that acts under a condition.

    Args:
        condition: the user's argument.
        every: when to ask, unless the condition is a schedule; default each epoch.
    """

    def __init__(self, condition: Condition, every: Schedule | None, name: str | None = None) -> None:
        known = isinstance(condition, Schedule | OnBest)
        if not (known or callable(condition)):
            raise ConfigError(
                f"{condition!r} is not a condition; give a schedule such as Every(epochs=1), "
                'OnBest("valid_loss"), or a function of the boundary'
            )
        if isinstance(condition, Schedule) and every is not None:
            raise ConfigError(f"every={every!r} beside the schedule {condition!r}: leave out every=")
        if isinstance(condition, OnBest) and isinstance(every, Schedule) and every.wall:
            raise ConfigError(f"every={every!r} with {condition!r}: give a schedule of steps or epochs")
        self._condition = condition
        self._described: Json = repr(condition) if known else described(condition, "condition")
        """Description of the condition, for comparison on resume."""
        if name is None:  # the same in every process
            text = str(getattr(condition, "__name__", self._described if known else "a function"))
            name = "when " + re.sub(r"\w+=None, |, \w+=None", "", text).replace("/", ".")
        schedule = condition if isinstance(condition, Schedule) else every
        super().__init__(name, Every(epochs=1) if schedule is None else schedule)
        self._best: Best | None = None
        if isinstance(condition, OnBest):
            self._best = Best(condition.metric, condition.mode, save=False)
            self.watches = (condition.metric,)

    def open(self, run: RunView) -> None:
        if self._best is not None:
            self._best.open(run)

    def met(self, boundary: Boundary) -> int | None:
        """Return the step whose state meets the condition, else None; called where the service is due."""
        if self._best is not None:
            place = self._best.look(boundary)
            return None if place is None else place.step
        if callable(self._condition) and not self._condition(boundary):
            return None
        return boundary.step

    def state_dict(self) -> Any:
        return None if self._best is None else self._best.state_dict()

    def load_state_dict(self, state: Any) -> None:
        if self._best is not None and state is not None:
            self._best.load_state_dict(state)


_DECISIONS = (Stop, Interrupt, SetValue)

Deed: TypeAlias = Action | Callable[[Boundary], None]


class When(Conditional):
    """Act where a condition holds, as Orbit's ConditionalAction does.

        When(OnBest("valid_loss"), Save())
        When(Every(epochs=5), [SetValue("optimizer.lr", times=0.5), tell])

    With OnBest the service acts once per best value, over restarts, too.  A function is called with the
    boundary and returns nothing.  Steps that are executed again after a kill call it again, so give a
    function that may be called twice, such as replacing a file.

    With a decision (`Stop`, `Interrupt`, `SetValue`) among its actions the service is a controller of stage
    DECIDE; otherwise it runs in stage SAVE, before this boundary's checkpoint.

    Args:
        condition: a schedule, `OnBest(metric)`, or a function of the boundary.
        actions: one or several: `Save()`, `Stop(reason)`, `SetValue(...)`, `Interrupt(reason)`, functions.
        every: when a function is asked, or a best value judged; default each epoch.
    """

    stage = Stage.SAVE

    def __init__(
        self,
        condition: Condition,
        actions: Deed | Sequence[Deed],
        *,
        every: Schedule | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(condition, every, name)
        self.actions = tuple(actions) if isinstance(actions, Sequence) else (actions,)
        for action in self.actions:
            if not isinstance(action, (*_DECISIONS, Save)) and (
                isinstance(action, type) or not callable(action)
            ):
                raise ConfigError(
                    f"{action!r} is not an action; give Save(), Stop(reason), Interrupt(reason), "
                    "SetValue(...) or a function of the boundary"
                )
        self.sets = tuple(action.target for action in self.actions if isinstance(action, SetValue))
        if any(isinstance(action, _DECISIONS) for action in self.actions):
            self.stage, self.controller = Stage.DECIDE, True

    def config(self) -> Json:
        actions: list[Json] = [str(action) for action in self.actions if isinstance(action, _DECISIONS)]
        return {"condition": self._described, "actions": actions, "every": repr(self.schedule)}

    def run(self, boundary: Boundary) -> Outcome | None:
        holds = self.met(boundary) is not None
        # also where the condition does not hold: each window reaches from one boundary to the next
        boundary.readings.clear()
        if not holds:
            return None
        for action in self.actions:
            if callable(action) and (result := action(boundary)) is not None:
                raise UsageError(
                    f"{self.name!r}: {action!r} returned {result!r}; return nothing, and give actions, such "
                    "as Stop(reason), beside the function"
                )
        return Outcome(actions=tuple(action for action in self.actions if not callable(action)))


class FunctionService(Service):
    """Call `fn(boundary)` at one moment; made by `loop.on`.

    Args:
        every: for AFTER_STEP and AFTER_EPOCH: a schedule, or n for every n steps or epochs.
    """

    def __init__(self, moment: Moment, fn: ServiceFunction, every: Schedule | int | None, name: str) -> None:
        if every is None or isinstance(every, int):
            count = 1 if every is None else every
            every = Every(epochs=count) if moment is Moment.AFTER_EPOCH else Every(steps=count)
        super().__init__(name, every)
        self.moments = frozenset({moment})
        if moment not in SCHEDULED:
            self.window = "none"
        self._fn = fn

    def run(self, boundary: Boundary) -> Outcome | None:
        return self._fn(boundary)
