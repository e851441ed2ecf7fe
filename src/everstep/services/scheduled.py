"""Hyper-parameters as pure functions of the step, and the service that sets them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from everstep.arguments import checked_init, integer
from everstep.backends.describe_values import described
from everstep.contracts.services import Boundary, Moment, Outcome, SetValue, Stage
from everstep.contracts.state import Json
from everstep.errors import ConfigError
from everstep.schedule import Every, Schedule
from everstep.services.controller import Controller


@checked_init
@dataclass(frozen=True)
class Annealing:
    """Value that is multiplied by `ratio` every n steps, or epochs: call it with the step's number.

        temperature = Annealing(1.0, 0.5, every=1000, least=0.1)
        for step, batch in loop.iter_steps(train):
            temperature(step)  # 1.0 at steps 1 to 1000, 0.5 at steps 1001 to 2000

    The value depends on that number alone, so step k has the same value in a fresh and in a resumed run.
    The idea comes from TFSnippet's AnnealingScalar.

    Args:
        initial: the value of the first `every` steps, or epochs.
        ratio: factor of the value.
        every: number of steps, or epochs, between two multiplications, 1 or more.
        least, most: limits of the value.

    Raises:
        ConfigError: `every` is out of its range, or `initial` is not between `least` and `most`.
    """

    initial: float
    ratio: float
    every: int = 1
    least: float = -math.inf
    most: float = math.inf

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", integer("every", self.every))
        if not self.least <= self.initial <= self.most:  # also true for NaN
            raise ConfigError(
                f"Annealing: initial={self.initial!r}, least={self.least!r}, most={self.most!r}: "
                "give bounds so that the initial value lies between them"
            )

    def __call__(self, number: int) -> float:
        """Return the value of a step, or of an epoch, by its number from 1; number 0 has the value of 1."""
        value: float = self.initial * self.ratio ** (max(number - 1, 0) // self.every)
        return min(max(value, self.least), self.most)


class Scheduled(Controller):
    """Set a number of the state to a function of the step: step k runs with `value(k)`.

        Scheduled("optimizer.lr", lambda step: 0.1 * min(1, step / 1000))

    Each change is a row of the record.  A scheduler of the state that computes the same learning rate
    would undo the change: take one of the two.

    Args:
        target: the number to set, as in `SetValue`.
        value: function of a step's number, from 1; it must depend on nothing else.
        every: steps after which the value is set; default `Every(steps=1)`.  In between, the value stays.

    Raises:
        ConfigError: `value` cannot be called.
    """

    stage = Stage.DECIDE
    moments = frozenset({Moment.ENTER_LOOP, Moment.AFTER_STEP})
    window = "none"
    default_schedule = Every(steps=1)

    def __init__(
        self,
        target: str,
        value: Callable[[int], float],
        *,
        every: Schedule | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name or f"schedule of {target}".replace("/", "."), every)
        if not callable(value):
            raise ConfigError(f"Scheduled({target!r}, {value!r}): give a function of the step")
        self.target, self.value, self.sets = target, value, (target,)
        self._described = repr(value) if isinstance(value, Annealing) else described(value, "value")

    def config(self) -> Json:
        return {"target": self.target, "value": self._described, "every": repr(self.schedule)}

    def run(self, boundary: Boundary) -> Outcome | None:
        if boundary.moment is Moment.ENTER_LOOP and boundary.step:
            return None  # a resume: the value is part of the state
        return Outcome(actions=(SetValue(self.target, float(self.value(boundary.step + 1))),))
