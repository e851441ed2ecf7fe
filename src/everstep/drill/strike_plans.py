"""Hazards of a drill: each plans the strikes at a program, one strike for each start.

On several ranks a hazard strikes one of them, chosen with equal chances, unless its name says whom.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from random import Random

from everstep.drill.program import ALL_RANKS, TORCHRUN, StepDigests, Strike
from everstep.errors import ConfigError, nearest


@dataclass(frozen=True)
class Landmarks:
    """What a rank of an undisturbed start passed, by which strikes are aimed.

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

    @cached_property
    def kills(self) -> list[str]:
        """The kill at each of the points."""
        seen = Counter[str]()
        kills = []
        for name in self.points:
            seen[name] += 1
            kills.append(f"kill:{name}:{seen[name]}")
        return kills

    def last_steps(self) -> list[int]:
        """List the ordinals, from 1, of the steps that end an epoch or a run."""
        records = [record for record in self.records if record.at in ("step", "epoch")]
        ends, count = [], 0
        for record, after in zip(records, [*records[1:], None], strict=True):
            count += record.at == "step"
            if record.at == "step" and (after is None or after.at == "epoch" or after.run != record.run):
                ends.append(count)
        return ends

    def first_saved(self) -> int:
        """Return the ordinal of the first step after a checkpoint of an earlier step; 0 without any."""
        at = next(iter(self.after_the_first_step("checkpoint.rename")), len(self.points))
        return self.points[:at].count("witness.step") + 1 if "witness.step" in self.points[at:] else 0

    def after_the_first_step(self, *names: str) -> list[int]:
        """List the points (by their indices) whose names begin so, after the first step."""
        return [i for i, name in enumerate(self.points) if i > self.begun and name.startswith(names)]


Plan = Callable[[Landmarks, Random], list[str]]
"""Chooses a hazard (`everstep.hazard`) for each start; none if the program has no such place."""


def _one_of(kills: Sequence[str], draw: Random) -> list[str]:
    return [draw.choice(kills)] if kills else []


def _at_step(what: str) -> Plan:
    return lambda landmarks, draw: [f"{what}:{draw.randint(1, landmarks.steps)}"]


def _after(*names: str) -> Plan:
    return lambda landmarks, draw: _one_of(
        [landmarks.kills[i] for i in landmarks.after_the_first_step(*names)], draw
    )


def _head(landmarks: Landmarks, draw: Random) -> list[str]:
    """Strike in the tail by SIGTERM, so that the epoch's end is saved; kill the next start in the head."""
    places = ("loop.tail_end", "witness.step", "loop.exit")
    passed = [name for name in landmarks.points if name in places]
    tails = [after for name, after in pairwise([*passed, ""]) if name == "loop.tail_end"]
    followed = [n for n, after in enumerate(tails, 1) if after == "witness.step"]
    return [f"SIGTERM:loop.tail_end:{draw.choice(followed)}", "kill:witness.before:1"] if followed else []


def _shutdown(landmarks: Landmarks, draw: Random) -> list[str]:
    return _one_of(landmarks.kills[-1 - landmarks.points[::-1].index("loop.exit") :], draw)


def _resume(landmarks: Landmarks, draw: Random) -> list[str]:
    """Kill in the first half, or once a checkpoint of a step is there; then kill the resumes."""
    saved, half = landmarks.first_saved(), max(1, landmarks.steps // 2)
    first = draw.randint(1, half) if saved <= half else draw.randint(saved, landmarks.steps)
    points = [f"witness.step:{first}", "journal.create:1", "witness.enter:1", "witness.step:1"]
    return [f"kill:{point}" for point in points if point.partition(":")[0] in landmarks.points]


def _signal_then_kill(landmarks: Landmarks, draw: Random) -> list[str]:
    step = draw.randint(1, landmarks.steps)
    points = ("checkpoint.mkdir", "checkpoint.write", "checkpoint.fsync", "checkpoint.rename")
    point = draw.choice([point for point in points if point in landmarks.points])
    return [f"SIGTERM:witness.step:{step} then kill:{point}:1"]


def _disk_full(landmarks: Landmarks, draw: Random) -> list[str]:
    before = landmarks.points[: landmarks.begun].count("checkpoint.write")
    after = landmarks.points[landmarks.begun :].count("checkpoint.write")
    return [f"ENOSPC:checkpoint.write:{before + draw.randint(1, max(1, after))}-1000000000"]


def _message(landmarks: Landmarks, draw: Random) -> list[str]:
    """Kill at a message of a commit; each kind of message with equal chances: there are more of some."""
    points = landmarks.after_the_first_step("checkpoint.tell_", "checkpoint.heard_", "checkpoint.verdict")
    kinds = sorted({landmarks.points[i] for i in points})
    return _after(draw.choice(kinds))(landmarks, draw) if kinds else []


HAZARDS: dict[str, Plan | None] = {
    "random instant": None,
    "start-up": lambda landmarks, draw: _one_of(landmarks.kills[: landmarks.begun], draw),
    "commit": _after("checkpoint."),
    "tail": _after("loop.tail"),
    "last step": lambda landmarks, draw: [f"kill:witness.step:{draw.choice(landmarks.last_steps())}"],
    "head": _head,
    "shutdown": _shutdown,
    "resume": _resume,
    "SIGTERM": _at_step("SIGTERM:witness.step"),
    "SIGINT": _at_step("SIGINT:witness.step"),
    "SIGTERM+SIGKILL": _signal_then_kill,
    "disk full": _disk_full,
}
"""Hazards by name; None: a kill at an instant."""

RANK_HAZARDS: dict[str, Plan | None] = {
    **HAZARDS,
    ALL_RANKS: None,
    TORCHRUN: None,
    "writer's commit": _message,
    "another's commit": _message,
    # as it begins a step: the others wait for it in the step's collectives
    "collective": _at_step("kill:witness.before"),
}
"""Hazards of a script on several ranks."""


def aim(hazard: str, ranks: Sequence[Landmarks], draw: Random) -> list[Strike]:
    """Plan the strikes of a hazard; none if the program has no such place (a Supervisor has no tail)."""
    rank, target = 0, ""
    if hazard in (ALL_RANKS, TORCHRUN):
        target = hazard
    elif len(ranks) > 1:
        first = 1 if hazard == "another's commit" else 0
        rank = 0 if hazard == "writer's commit" else draw.randrange(first, len(ranks))
        target = f"rank {rank}"
    plan, landmarks = RANK_HAZARDS[hazard], ranks[rank]
    if plan is None:
        records = landmarks.records
        return [Strike(seconds=draw.uniform(0, records[-1].time - records[0].time), target=target)]
    return [Strike(spec, target=target) for spec in plan(landmarks, draw)]


def chosen(names: Iterable[str], ranks: int = 1) -> list[str]:
    """Return the hazards that a user named; all of them if none is named."""
    names, known = list(names), list(HAZARDS if ranks == 1 else RANK_HAZARDS)
    for name in names:
        if name not in known:
            hint = "it needs --ranks 2 or more" if name in RANK_HAZARDS else nearest(name, known)
            raise ConfigError(f"no hazard {name!r}; {hint}")
    return names or known
