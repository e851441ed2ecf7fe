"""Hazards of a drill: each plans the strikes at a program, one strike for each start.

On several ranks a hazard strikes one of them, chosen with equal chances; `RANK_HAZARDS` strike as only
several ranks can be struck.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from random import Random

from everstep.drill.program import ALL_RANKS, TORCHRUN, StepDigests, Strike
from everstep.errors import ConfigError, nearest


@dataclass(frozen=True)
class Landmarks:
    """Points that a rank of an undisturbed start passed, by which strikes are aimed.

    Attributes:
        records: what this rank found at its steps.
        points: the hazards that the rank passed, in order.
    """

    records: list[StepDigests] = field(repr=False)
    points: list[str] = field(repr=False)

    @cached_property
    def begun(self) -> int:
        """Index of the point that ends the first step."""
        return self.points.index("witness.step")

    @cached_property
    def steps(self) -> int:
        """Number of completed steps, over all runs."""
        return self.points.count("witness.step")

    @property
    def seconds(self) -> float:
        """Seconds from the first record to the last."""
        return self.records[-1].time - self.records[0].time if self.records else 0.0

    @cached_property
    def last_steps(self) -> list[int]:
        """Ordinals, from 1, of the steps that end an epoch or a run."""
        records = [record for record in self.records if record.at in ("step", "epoch")]
        ends, count = [], 0
        for record, after in zip(records, [*records[1:], None], strict=True):
            count += record.at == "step"
            if record.at == "step" and (after is None or after.at == "epoch" or after.run != record.run):
                ends.append(count)
        return ends

    @cached_property
    def first_saved(self) -> int:
        """Ordinal of the first step that begins after a checkpoint of an earlier step; 0 if there is none."""
        at = next(iter(self.after_the_first_step("checkpoint.rename")), len(self.points))
        return self.points[:at].count("witness.step") + 1 if "witness.step" in self.points[at:] else 0

    def after_the_first_step(self, *names: str) -> list[int]:
        """List the points (by their indices) whose names begin so, after the first step."""
        return [i for i, name in enumerate(self.points) if i > self.begun and name.startswith(names)]

    def kill_at_one(self, points: Sequence[int], draw: Random) -> list[Strike]:
        """Kill at one of these points (indices), chosen with equal chances."""
        if not points:
            return []
        at = draw.choice(points)
        return [Strike(f"kill:{self.points[at]}:{self.points[: at + 1].count(self.points[at])}")]


Aim = Callable[[Landmarks, Random], list[Strike]]
RankAim = Callable[[Sequence[Landmarks], Random], list[Strike]]


def _random_instant(landmarks: Landmarks, draw: Random) -> list[Strike]:
    return [Strike(seconds=draw.uniform(0, landmarks.seconds))]


def _at_step(what: str) -> Aim:
    """Strike at one of all steps: `what` is "ACTION:POINT"."""
    return lambda landmarks, draw: [Strike(f"{what}:{draw.randint(1, landmarks.steps)}")]


def _after(*names: str) -> Aim:
    """Kill at a point after the first step whose name begins so."""
    return lambda landmarks, draw: landmarks.kill_at_one(landmarks.after_the_first_step(*names), draw)


def _head(landmarks: Landmarks, draw: Random) -> list[Strike]:
    """Strike in the tail by SIGTERM, so that the epoch's end is saved; kill the next start in the head."""
    places = ("loop.tail_end", "witness.step", "loop.exit")
    passed = [name for name in landmarks.points if name in places]
    tails = [after for name, after in pairwise([*passed, ""]) if name == "loop.tail_end"]
    followed = [n for n, after in enumerate(tails, 1) if after == "witness.step"]
    if not followed:
        return []
    return [Strike(f"SIGTERM:loop.tail_end:{draw.choice(followed)}"), Strike("kill:witness.before:1")]


def _shutdown(landmarks: Landmarks, draw: Random) -> list[Strike]:
    end = len(landmarks.points) - 1 - landmarks.points[::-1].index("loop.exit")
    return landmarks.kill_at_one(range(end, len(landmarks.points)), draw)


def _resume(landmarks: Landmarks, draw: Random) -> list[Strike]:
    """Kill in the first half, or once a checkpoint of a step is there; then kill the resumes."""
    saved, half = landmarks.first_saved, max(1, landmarks.steps // 2)
    first = draw.randint(1, half) if saved <= half else draw.randint(saved, landmarks.steps)
    points = [f"witness.step:{first}", "journal.create:1", "witness.enter:1", "witness.step:1"]
    passed = [point for point in points if point.partition(":")[0] in landmarks.points]
    return [Strike(f"kill:{point}") for point in passed]


def _signal_then_kill(landmarks: Landmarks, draw: Random) -> list[Strike]:
    (term,) = _at_step("SIGTERM:witness.step")(landmarks, draw)
    points = ("checkpoint.mkdir", "checkpoint.write", "checkpoint.fsync", "checkpoint.rename")
    point = draw.choice([point for point in points if point in landmarks.points])
    return [Strike(f"{term.spec} then kill:{point}:1")]


def _disk_full(landmarks: Landmarks, draw: Random) -> list[Strike]:
    before = landmarks.points[: landmarks.begun].count("checkpoint.write")
    after = landmarks.points[landmarks.begun :].count("checkpoint.write")
    return [Strike(f"ENOSPC:checkpoint.write:{before + draw.randint(1, max(1, after))}-1000000000")]


def _message(landmarks: Landmarks, draw: Random) -> list[Strike]:
    """Kill at a message of a commit; each kind of message with equal chances: there are more of some."""
    points = landmarks.after_the_first_step("checkpoint.tell_", "checkpoint.heard_", "checkpoint.verdict")
    kinds = sorted({landmarks.points[i] for i in points})
    kind = draw.choice(kinds) if kinds else ""
    return landmarks.kill_at_one([i for i in points if landmarks.points[i] == kind], draw)


def _one_rank(aim: Aim) -> RankAim:
    """Strike one rank, chosen with equal chances."""

    def aimed(ranks: Sequence[Landmarks], draw: Random) -> list[Strike]:
        rank = draw.randrange(len(ranks))
        return _at(f"rank {rank}", aim(ranks[rank], draw))

    return aimed


def _another(ranks: Sequence[Landmarks], draw: Random) -> list[Strike]:
    """Kill at a message of a commit a rank that is not the writer."""
    rank = draw.randrange(1, len(ranks))
    return _at(f"rank {rank}", _message(ranks[rank], draw))


def _at(target: str, strikes: Iterable[Strike]) -> list[Strike]:
    return [strike._replace(target=target) for strike in strikes]


HAZARDS: dict[str, Aim] = {
    "random instant": _random_instant,
    "start-up": lambda landmarks, draw: landmarks.kill_at_one(range(landmarks.begun), draw),
    "commit": _after("checkpoint."),
    "tail": _after("loop.tail"),
    "last step": lambda landmarks, draw: [Strike(f"kill:witness.step:{draw.choice(landmarks.last_steps)}")],
    "head": _head,
    "shutdown": _shutdown,
    "resume": _resume,
    "SIGTERM": _at_step("SIGTERM:witness.step"),
    "SIGINT": _at_step("SIGINT:witness.step"),
    "SIGTERM+SIGKILL": _signal_then_kill,
    "disk full": _disk_full,
}
"""Hazards by name; a hazard gives no strike if the program has no such place (a Supervisor has no tail)."""

RANK_HAZARDS: dict[str, RankAim] = {
    **{name: _one_rank(aim) for name, aim in HAZARDS.items()},
    "all ranks": lambda ranks, draw: _at(ALL_RANKS, _random_instant(ranks[0], draw)),
    "torchrun": lambda ranks, draw: _at(TORCHRUN, _random_instant(ranks[0], draw)),
    "writer's commit": lambda ranks, draw: _at("rank 0", _message(ranks[0], draw)),
    "another's commit": _another,
    # as it begins a step: the others wait for it in the step's collectives
    "collective": _one_rank(_at_step("kill:witness.before")),
}
"""Hazards of a script on several ranks."""


def aim(hazard: str, ranks: Sequence[Landmarks], draw: Random) -> list[Strike]:
    """Plan the strikes of a hazard; none if the program has no such place."""
    return HAZARDS[hazard](ranks[0], draw) if len(ranks) == 1 else RANK_HAZARDS[hazard](ranks, draw)


def chosen(names: Iterable[str], ranks: int = 1) -> list[str]:
    """Return the hazards that a user named; all of them if none is named."""
    names, known = list(names), list(HAZARDS if ranks == 1 else RANK_HAZARDS)
    for name in names:
        if name not in known:
            hint = "it needs --ranks 2 or more" if name in RANK_HAZARDS else nearest(name, known)
            raise ConfigError(f"no hazard {name!r}; {hint}")
    return names or known
