"""Schedules: `Every(steps=100)`, `At(10, 50)`, `Every(epochs=1) | Every(seconds=600)`.

A schedule is asked at boundaries only (after a step, after an epoch): whether it is due, and before which
step it need not be asked again, so that one comparison of integers tells that nothing is due.

Steps and epochs are due at multiples of n, counted from the run's first step: a resumed run has them at the
same steps.  A schedule in seconds is left out of comparisons of runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from everstep.arguments import checked_init, checked_keywords, integer, number
from everstep.errors import ConfigError

NEVER = 1 << 62
"""Step number that no run reaches."""


class Instant(NamedTuple):
    """Facts about a boundary: the last complete step, the epoch (0 before the first), monotonic seconds."""

    step: int
    epoch: int
    at_epoch_end: bool
    now: float


class Schedule:
    """Base of all schedules; combine two with `|` (either is due) or `&` (both are due)."""

    at_ends: bool | None = None
    """True: due at ends of epochs alone; False: after steps alone."""

    def due(self, when: Instant) -> bool:
        """Whether the schedule is due at a boundary."""
        raise NotImplementedError(type(self).__name__)

    def next_step(self, step: int) -> int:
        """Return the first step after `step` at which the schedule may be due, or `NEVER`; else the next."""
        return step + 1

    def next_time(self) -> float | None:
        """Return the clock time at which the schedule becomes due; None if no clock decides that."""
        return None

    def start(self, now: float) -> None:
        """Begin to count seconds; called once, when the loop opens."""

    def fired(self, when: Instant) -> None:
        """Note that the scheduled action has run at a boundary."""

    @property
    def wall(self) -> bool:
        """Whether the schedule depends on the clock, and is therefore left out of comparisons."""
        return False

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __or__(self, other: Schedule) -> Schedule:
        return _Pair(self, "|", other)

    def __and__(self, other: Schedule) -> Schedule:
        return _Pair(self, "&", other)


@checked_init
@dataclass(eq=False)
class Every(Schedule):
    """Due every n steps, n epochs or n seconds; exactly one of the three.

    Args:
        steps: positive int; due after steps n, 2n, 3n ...
        epochs: positive int; due at the end of epochs n, 2n ...
        seconds: positive number of seconds since the loop opened or since the schedule last fired.
    """

    steps: int | None = None
    epochs: int | None = None
    seconds: float | None = None
    _last: float = field(default=0.0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        units = [n for n in ("steps", "epochs", "seconds") if getattr(self, n) is not None]
        if len(units) != 1:
            raise ConfigError(
                f"Every() takes exactly one of steps, epochs, seconds; got {units or 'none'}. "
                "Combine two with |, as in Every(epochs=1) | Every(seconds=600)"
            )
        if self.seconds is None:
            setattr(self, units[0], integer(units[0], getattr(self, units[0])))
            self.at_ends = self.steps is None
        else:
            self.seconds = number("seconds", self.seconds)

    def due(self, when: Instant) -> bool:
        if self.steps is not None:
            return not when.at_epoch_end and when.step > 0 and when.step % self.steps == 0
        if self.epochs is not None:
            return when.at_epoch_end and when.epoch > 0 and when.epoch % self.epochs == 0
        assert self.seconds is not None
        return when.now - self._last >= self.seconds

    def next_step(self, step: int) -> int:
        return NEVER if self.steps is None else step - step % self.steps + self.steps

    def next_time(self) -> float | None:
        return None if self.seconds is None else self._last + self.seconds

    def start(self, now: float) -> None:
        self._last = now

    def fired(self, when: Instant) -> None:
        if self.seconds is not None:
            self._last = when.now

    @property
    def wall(self) -> bool:
        return self.seconds is not None


class At(Schedule):
    """Due after the given steps (positive numbers, in any order), and at no other."""

    at_ends = False

    @checked_keywords
    def __init__(self, *steps: int) -> None:
        if not steps:
            raise ConfigError("At() needs at least one step number, as in At(100, 1000)")
        # sorted and without repetitions, so that equal schedules compare equal
        self.steps = tuple(sorted({integer("step", step) for step in steps}))

    def due(self, when: Instant) -> bool:
        return not when.at_epoch_end and when.step in self.steps

    def next_step(self, step: int) -> int:
        return min((s for s in self.steps if s > step), default=NEVER)

    def __repr__(self) -> str:
        return f"At({', '.join(map(str, self.steps))})"


class Never(Schedule):
    """Never due; forced runs (a stop, an interruption, an explicit call) still happen."""

    def due(self, when: Instant) -> bool:
        return False

    def next_step(self, step: int) -> int:
        return NEVER

    def __repr__(self) -> str:
        return "Never()"


class Unscheduled(Never):
    """Schedule of a service whose class and maker name none."""


class _Pair(Schedule):
    """Two schedules of which either is to be due ("|"), or both ("&")."""

    def __init__(self, left: Schedule, word: str, right: Schedule) -> None:
        for side in (left, right):
            if not isinstance(side, Schedule):
                raise ConfigError(f"{side!r} is not a schedule; combine values such as Every(steps=100)")
        self.sides, self.both = (left, right), word == "&"
        self._repr = f"({left!r} {word} {right!r})"
        ends = {side.at_ends for side in self.sides}
        if self.both and ends == {True, False}:
            raise ConfigError(
                f"{self!r} is never due, as the end of an epoch is a boundary after that of its last step; "
                "give one of the two"
            )
        known = [end for end in ends if end is not None]
        self.at_ends = known[0] if known and (self.both or len(ends) == 1) else None

    def due(self, when: Instant) -> bool:
        return (all if self.both else any)(side.due(when) for side in self.sides)

    def next_step(self, step: int) -> int:
        return min(side.next_step(step) for side in self.sides)

    def next_time(self) -> float | None:
        times = [side.next_time() for side in self.sides]
        if not self.both:
            return earliest(times)
        if not all(side.wall for side in self.sides):
            return None  # a side in steps or epochs brings the loop to a boundary by itself
        return max((t for t in times if t is not None), default=None)

    def start(self, now: float) -> None:
        for side in self.sides:
            side.start(now)

    def fired(self, when: Instant) -> None:
        for side in self.sides:
            side.fired(when)

    @property
    def wall(self) -> bool:
        return any(side.wall for side in self.sides)

    def __repr__(self) -> str:
        return self._repr


def earliest(times: Iterable[float | None]) -> float | None:
    return min((t for t in times if t is not None), default=None)
