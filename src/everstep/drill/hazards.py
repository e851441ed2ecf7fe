"""Hazards of a drill: each aims the strikes at the starts of a program, one strike for each start."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from random import Random

from everstep.drill.victim import Start, Strike
from everstep.errors import ConfigError, nearest


@dataclass(frozen=True)
class Course:
    """Points that an undisturbed start passed, by which strikes are aimed.

    Attributes:
        start: the undisturbed start.
        points: the hazards that the start passed, in order.
    """

    start: Start
    points: list[str] = field(repr=False)

    @cached_property
    def steps(self) -> int:
        """Number of completed steps, over all runs of the start."""
        return self.points.count("witness.step")

    @cached_property
    def last_steps(self) -> list[int]:
        """Ordinals, from 1, of the steps that end an epoch or a run."""
        steps = [record for record in self.start.records if record.at in ("step", "epoch")]
        ends, count = [], 0
        for record, after in zip(steps, [*steps[1:], None], strict=True):
            count += record.at == "step"
            if record.at == "step" and (after is None or after.at == "epoch" or after.run != record.run):
                ends.append(count)
        return ends

    def goes_on(self, point: int) -> bool:
        """Whether a step follows a point (given by its index) before a run ends."""
        after = (name for name in self.points[point:] if name in ("witness.step", "loop.exit"))
        return next(after, None) == "witness.step"

    def any_of(self, points: Iterable[int], draw: Random) -> list[Strike]:
        """Kill at one of these points (indices), chosen with equal chances."""
        choice = list(points)
        if not choice:
            return []
        at = draw.choice(choice)
        name = self.points[at]
        return [Strike(f"kill:{name}:{self.points[: at + 1].count(name)}")]


def _random_instant(course: Course, draw: Random) -> list[Strike]:
    records = course.start.records
    return [Strike(seconds=draw.uniform(0, records[-1].time - records[0].time))]


def _start_up(course: Course, draw: Random) -> list[Strike]:
    return course.any_of(range(course.points.index("witness.step")), draw)


def _commit(course: Course, draw: Random) -> list[Strike]:
    begun = course.points.index("witness.step")
    writes = [i for i, name in enumerate(course.points) if name.startswith("checkpoint.") and i > begun]
    return course.any_of(writes, draw)


def _tail(course: Course, draw: Random) -> list[Strike]:
    tails = [i for i, name in enumerate(course.points) if name in ("loop.tail", "loop.tail_end")]
    return course.any_of(tails, draw)


def _last_step(course: Course, draw: Random) -> list[Strike]:
    return [Strike(f"kill:witness.step:{draw.choice(course.last_steps)}")]


def _head(course: Course, draw: Random) -> list[Strike]:
    """Strike in the tail by SIGTERM, so that the epoch's end is saved; kill the next start in the head."""
    followed = [
        course.points[: i + 1].count("loop.tail_end")
        for i, name in enumerate(course.points)
        if name == "loop.tail_end" and course.goes_on(i)
    ]
    if not followed:
        return []
    return [Strike(f"SIGTERM:loop.tail_end:{draw.choice(followed)}"), Strike("kill:witness.before:1")]


def _shutdown(course: Course, draw: Random) -> list[Strike]:
    end = len(course.points) - 1 - course.points[::-1].index("loop.exit")
    return course.any_of(range(end, len(course.points)), draw)


def _resume(course: Course, draw: Random) -> list[Strike]:
    first = draw.randint(1, max(1, course.steps // 2))
    points = [f"witness.step:{first}", "journal.create:1", "witness.enter:1", "witness.step:1"]
    return [Strike(f"kill:{point}") for point in points]


def _signal(name: str) -> Aim:
    return lambda course, draw: [Strike(f"{name}:witness.step:{draw.randint(1, course.steps)}")]


def _signal_then_kill(course: Course, draw: Random) -> list[Strike]:
    (term,) = _signal("SIGTERM")(course, draw)
    point = draw.choice(("checkpoint.mkdir", "checkpoint.write", "checkpoint.fsync", "checkpoint.rename"))
    return [Strike(f"{term.spec} then kill:{point}:1")]


def _disk_full(course: Course, draw: Random) -> list[Strike]:
    begun = course.points.index("witness.step")
    before = course.points[:begun].count("checkpoint.write")
    after = course.points[begun:].count("checkpoint.write")
    return [Strike(f"ENOSPC:checkpoint.write:{before + draw.randint(1, max(1, after))}-1000000000")]


Aim = Callable[[Course, Random], list[Strike]]

HAZARDS: dict[str, Aim] = {
    "random instant": _random_instant,
    "start-up": _start_up,
    "commit": _commit,
    "tail": _tail,
    "last step": _last_step,
    "head": _head,
    "shutdown": _shutdown,
    "resume": _resume,
    "SIGTERM": _signal("SIGTERM"),
    "SIGINT": _signal("SIGINT"),
    "SIGTERM+SIGKILL": _signal_then_kill,
    "disk full": _disk_full,
}
"""Hazards by name; a hazard gives no strike if the program has no such place (a Supervisor has no tail)."""


def chosen(names: Iterable[str]) -> list[str]:
    """Return the hazards that a user named; all of them if none is named.

    Raises:
        ConfigError: no hazard has that name; names the nearest.
    """
    names = list(names)
    for name in names:
        if name not in HAZARDS:
            raise ConfigError(f"no hazard {name!r}; {nearest(name, HAZARDS)}")
    return names or list(HAZARDS)
