"""Actions under a condition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from everstep.contracts.services import (
    Action,
    Boundary,
    Interrupt,
    Outcome,
    Save,
    Service,
    SetValue,
    Stage,
    Stop,
)
from everstep.contracts.state import Json
from everstep.errors import ConfigError, UsageError
from everstep.schedule import Schedule
from everstep.services.condition import Condition, Trigger

_DECISIONS = (Stop, Interrupt, SetValue)

Deed: TypeAlias = Action | Callable[[Boundary], None]


class When(Service):
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

    Raises:
        ConfigError: an argument is not a condition or an action, or `every` does not go with the condition.
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
        self._trigger = Trigger(condition, every)
        super().__init__(name or f"when {self._trigger.name}", self._trigger.schedule)
        self.watches = self._trigger.watches
        self.actions = tuple(actions) if isinstance(actions, Sequence) else (actions,)
        for action in self.actions:
            if not (
                isinstance(action, (*_DECISIONS, Save)) or (callable(action) and not isinstance(action, type))
            ):
                raise ConfigError(
                    f"{action!r} is not an action; give Save(), Stop(reason), Interrupt(reason), "
                    "SetValue(...) or a function of the boundary"
                )
        self.sets = tuple(action.target for action in self.actions if isinstance(action, SetValue))
        if any(isinstance(action, _DECISIONS) for action in self.actions):
            self.stage, self.controller = Stage.DECIDE, True

    def config(self) -> Json:
        actions = [str(action) if isinstance(action, _DECISIONS) else "" for action in self.actions]
        return {
            "condition": self._trigger.described,
            "actions": [text for text in actions if text],
            "every": repr(self.schedule),
        }

    def open(self, run: Any) -> None:
        self._trigger.open(run)

    def run(self, boundary: Boundary) -> Outcome | None:
        holds = self._trigger.asked(boundary) is not None
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

    def state_dict(self) -> Any:
        return self._trigger.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._trigger.load_state_dict(state)
