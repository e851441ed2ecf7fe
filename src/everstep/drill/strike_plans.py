"""Hazards of a drill: each plans the strikes at a program, one strike for each start."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from random import Random

from everstep.drill.program import ProgramStart, Strike
from everstep.errors import ConfigError, nearest


@dataclass(frozen=True)
class Landmarks:
    """Points that an undisturbed start passed, by which strikes are aimed.

    Attributes:
        start: the undisturbed start.
        points: the hazards that the start passed, in order.
    """

    start: ProgramStart
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

    @cached_property
    def first_saved(self) -> int:
        """Ordinal of the first step that begins after a checkpoint of an earlier step; 0 if there is none."""
        begun = self.points.index("witness.step")
        saved = (i for i, name in enumerate(self.points) if name == "checkpoint.rename" and i > begun)
        at = next(saved, len(self.points))
        return self.points[:at].count("witness.step") + 1 if "witness.step" in self.points[at:] else 0

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


def _random_instant(landmarks: Landmarks, draw: Random) -> list[Strike]:
    records = landmarks.start.records
    return [Strike(seconds=draw.uniform(0, records[-1].time - records[0].time))]


def _start_up(landmarks: Landmarks, draw: Random) -> list[Strike]:
    return landmarks.any_of(range(landmarks.points.index("witness.step")), draw)


def _commit(landmarks: Landmarks, draw: Random) -> list[Strike]:
    begun = landmarks.points.index("witness.step")
    writes = [i for i, name in enumerate(landmarks.points) if name.startswith("checkpoint.") and i > begun]
    return landmarks.any_of(writes, draw)


def _tail(landmarks: Landmarks, draw: Random) -> list[Strike]:
    tails = [i for i, name in enumerate(landmarks.points) if name in ("loop.tail", "loop.tail_end")]
    return landmarks.any_of(tails, draw)


def _last_step(landmarks: Landmarks, draw: Random) -> list[Strike]:
    return [Strike(f"kill:witness.step:{draw.choice(landmarks.last_steps)}")]


def _head(landmarks: Landmarks, draw: Random) -> list[Strike]:
    """Strike in the tail by SIGTERM, so that the epoch's end is saved; kill the next start in the head."""
    followed = [
        landmarks.points[: i + 1].count("loop.tail_end")
        for i, name in enumerate(landmarks.points)
        if name == "loop.tail_end" and landmarks.goes_on(i)
    ]
    if not followed:
        return []
    return [Strike(f"SIGTERM:loop.tail_end:{draw.choice(followed)}"), Strike("kill:witness.before:1")]


def _shutdown(landmarks: Landmarks, draw: Random) -> list[Strike]:
    end = len(landmarks.points) - 1 - landmarks.points[::-1].index("loop.exit")
    return landmarks.any_of(range(end, len(landmarks.points)), draw)


def _resume(landmarks: Landmarks, draw: Random) -> list[Strike]:
    """Kill in the first half, or once a checkpoint of a step is there; then kill the resumes."""
    saved = landmarks.first_saved
    early = max(1, landmarks.steps // 2)
    first = draw.randint(1, early) if saved <= early else draw.randint(saved, landmarks.steps)
    points = [f"witness.step:{first}", "journal.create:1", "witness.enter:1", "witness.step:1"]
    return [Strike(f"kill:{point}") for point in points]


def _signal(name: str) -> Aim:
    return lambda landmarks, draw: [Strike(f"{name}:witness.step:{draw.randint(1, landmarks.steps)}")]


def _signal_then_kill(landmarks: Landmarks, draw: Random) -> list[Strike]:
    (term,) = _signal("SIGTERM")(landmarks, draw)
    point = draw.choice(("checkpoint.mkdir", "checkpoint.write", "checkpoint.fsync", "checkpoint.rename"))
    return [Strike(f"{term.spec} then kill:{point}:1")]


def _disk_full(landmarks: Landmarks, draw: Random) -> list[Strike]:
    begun = landmarks.points.index("witness.step")
    before = landmarks.points[:begun].count("checkpoint.write")
    after = landmarks.points[begun:].count("checkpoint.write")
    return [Strike(f"ENOSPC:checkpoint.write:{before + draw.randint(1, max(1, after))}-1000000000")]


Aim = Callable[[Landmarks, Random], list[Strike]]

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
