"""Coverage of a drill: the windows of a run that were struck, and aims at what was not struck yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from everstep.drill.program import ProgramStart, Strike
from everstep.drill.strike_plans import Landmarks

_AT_ITS_NAME = ("start-up", "commit", "tail", "shutdown")
"""Hazards that strike at a point of the window that has their name."""

CANDIDATES = 8
"""Number of drawn plans from which one is chosen."""


def window(start: ProgramStart, hazard: str, where: str) -> str:
    """Name the window in which a start was struck.

    Args:
        where: the place in words, see `everstep.drill.struck.where`.
    """
    if hazard in _AT_ITS_NAME:
        return hazard
    point = "" if start.strike is None else start.strike.point
    if hazard == "head":
        return "tail" if point == "loop.tail_end" else "head"
    if where in ("start-up", "shutdown"):
        return where
    return "commit" if point.startswith("checkpoint.") else "step"


@dataclass
class Aims:
    """Chooses among plans that a hazard draws the one farthest from what was struck before."""

    struck: list[tuple[str, float]] = field(default_factory=list)
    """Point and place, from 0 at the first to 1 at the last of a run, of each strike so far."""

    def choose(self, ranks: Sequence[Landmarks], plan: Callable[[], list[Strike]]) -> list[Strike]:
        """Draw some plans; return one with a new point, or else the farthest from the earlier strikes."""
        plans = [plan() for _ in range(CANDIDATES if self.struck else 1)]
        return max(plans, key=lambda strikes: self._novelty(ranks, strikes))

    def note(self, ranks: Sequence[Landmarks], strikes: list[Strike]) -> None:
        """Note strikes that have hit."""
        self.struck += [_place(ranks, strike) for strike in strikes[:1]]

    def _novelty(self, ranks: Sequence[Landmarks], strikes: list[Strike]) -> tuple[bool, float]:
        if not strikes:
            return False, 0.0
        point, place = _place(ranks, strikes[0])
        is_new = all(point != other for other, _ in self.struck)
        return is_new, min((abs(place - other) for _, other in self.struck), default=1.0)


def _place(ranks: Sequence[Landmarks], strike: Strike) -> tuple[str, float]:
    landmarks = ranks[strike.rank]
    if strike.seconds is not None:
        return "", strike.seconds / max(landmarks.seconds, 1e-9)
    name, number = strike.aimed_at
    at = [index for index, point in enumerate(landmarks.points) if point == name]
    return name, at[min(number, len(at)) - 1] / len(landmarks.points)
