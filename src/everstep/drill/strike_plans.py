"""Hazards of a drill: each plans the strikes at a program, one strike for each start.

On several ranks a hazard strikes one of them, chosen with equal chances, unless its name says whom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from random import Random
from typing import TypeAlias

from everstep.drill.program import ALL_RANKS, TORCHRUN, Strike
from everstep.errors import ConfigError, nearest

Points: TypeAlias = Sequence[str]
"""The hazards that a rank of an undisturbed start passed, in order."""
Plan: TypeAlias = Callable[[Points, Random], list[str]]
"""Chooses a hazard for each start, as `everstep.hazard` has it; none if the program has no such place."""

STEP = "witness.step"


def _later(points: Points, *names: str) -> list[int]:
    """List the points (by their indices) whose names begin so, after the first step."""
    start = points.index(STEP)
    return [i for i, name in enumerate(points) if i > start and name.startswith(names)]


def _followed(points: Points, name: str, others: Sequence[str]) -> list[str]:
    """List what comes next, among points of this name and of other ones, after each point of this name."""
    sequence = [each for each in points if each == name or each in others]
    return [following for each, following in pairwise([*sequence, ""]) if each == name]


def _kill_at(points: Points, indices: Sequence[int], draw: Random) -> list[str]:
    if not indices:
        return []
    at = draw.choice(indices)
    return [f"kill:{points[at]}:{points[: at + 1].count(points[at])}"]


def _after(*names: str) -> Plan:
    return lambda points, draw: _kill_at(points, _later(points, *names), draw)


def _at_step(action: str) -> Plan:
    return lambda points, draw: [f"{action}:{draw.randint(1, points.count(STEP))}"]


def _last_step(points: Points, draw: Random) -> list[str]:
    after = _followed(points, STEP, ("witness.epoch", "witness.exit"))
    return [f"kill:{STEP}:{draw.choice([n for n, name in enumerate(after, 1) if name != STEP])}"]


def _head(points: Points, draw: Random) -> list[str]:
    """Strike in the tail by SIGTERM, so that the epoch's end is saved; kill the next start in the head."""
    after = _followed(points, "loop.tail_end", (STEP, "loop.exit"))
    tails = [n for n, name in enumerate(after, 1) if name == STEP]
    return [f"SIGTERM:loop.tail_end:{draw.choice(tails)}", "kill:witness.before:1"] if tails else []


def _shutdown(points: Points, draw: Random) -> list[str]:
    end = len(points) - 1 - points[::-1].index("loop.exit")
    return _kill_at(points, range(end, len(points)), draw)


def _resume(points: Points, draw: Random) -> list[str]:
    """Kill in the first half, or once a checkpoint of a step is there; then kill the resumes."""
    steps = points.count(STEP)
    first_saved = points[: next(iter(_later(points, "checkpoint.rename")), len(points))].count(STEP) + 1
    half = max(1, steps // 2)
    first = draw.randint(first_saved, steps) if half < first_saved <= steps else draw.randint(1, half)
    places = [f"{STEP}:{first}", "journal.create:1", "witness.enter:1", f"{STEP}:1"]
    return [f"kill:{place}" for place in places if place.partition(":")[0] in points]


def _signal_then_kill(points: Points, draw: Random) -> list[str]:
    step = draw.randint(1, points.count(STEP))
    names = ("checkpoint.mkdir", "checkpoint.write", "checkpoint.fsync", "checkpoint.rename")
    name = draw.choice([name for name in names if name in points])
    return [f"SIGTERM:{STEP}:{step} then kill:{name}:1"]


def _disk_full(points: Points, draw: Random) -> list[str]:
    start = points.index(STEP)
    before, after = (part.count("checkpoint.write") for part in (points[:start], points[start:]))
    return [f"ENOSPC:checkpoint.write:{before + draw.randint(1, max(1, after))}-1000000000"]


def _message(points: Points, draw: Random) -> list[str]:
    """Kill at a message of a commit; each kind of message with equal chances: there are more of some."""
    messages = _later(points, "checkpoint.tell_", "checkpoint.heard_", "checkpoint.verdict")
    kinds = sorted({points[i] for i in messages})
    return _after(draw.choice(kinds))(points, draw) if kinds else []


HAZARDS: dict[str, Plan | None] = {
    "random instant": None,
    "start-up": lambda points, draw: _kill_at(points, range(points.index(STEP)), draw),
    "commit": _after("checkpoint."),
    "tail": _after("loop.tail"),
    "last step": _last_step,
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


def aim(hazard: str, ranks: Sequence[Points], seconds: float, draw: Random) -> list[Strike]:
    """Plan the strikes of a hazard, by what each rank of an undisturbed start passed in a number of seconds.

    None if the program has no such place (a Supervisor has no tail).
    """
    rank, target = 0, ""
    if hazard in (ALL_RANKS, TORCHRUN):
        target = hazard
    elif len(ranks) > 1:
        first = 1 if hazard == "another's commit" else 0
        rank = 0 if hazard == "writer's commit" else draw.randrange(first, len(ranks))
        target = f"rank {rank}"
    plan = RANK_HAZARDS[hazard]
    if plan is None:
        return [Strike(seconds=draw.uniform(0, seconds), target=target)]
    return [Strike(spec, target=target) for spec in plan(ranks[rank], draw)]


def choose_hazards(names: Iterable[str], ranks: int = 1) -> list[str]:
    """Return the hazards that a user named; all of them if none is named."""
    names, known = list(names), list(HAZARDS if ranks == 1 else RANK_HAZARDS)
    for name in names:
        if name not in known:
            hint = "it needs --ranks 2 or more" if name in RANK_HAZARDS else nearest(name, known)
            raise ConfigError(f"no hazard {name!r}; {hint}")
    return names or known
