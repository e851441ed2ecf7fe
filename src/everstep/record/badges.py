"""Badges: how the resume of each start was verified, in the words that commands and the page use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

from everstep.record.event_fields import misfit

REPORTS = {
    "verified": "resume verified",
    "nothing to verify": "resume has nothing to verify",  # a clean stop: no step was executed again
    "not verified": "resume not verified",
}
"""Kind of a badge -> how the report of such a resume begins."""

WORST_FIRST = ("diverged", "not verified", "verified", "nothing to verify")
"""Kinds of badges, the one first by which a run is judged that has it."""


class Badge(NamedTuple):
    """How the resume of a start was verified.

    `at` is the step of its first divergence; `steps` were compared, by its first report.
    """

    kind: Literal["first", "verified", "not verified", "nothing to verify", "diverged"]
    at: int | None = None
    report: str = ""
    steps: int = 0

    def __str__(self) -> str:
        return self.kind if self.at is None else f"{self.kind} at {self.at}"


class Start(NamedTuple):
    """What is known of a start, besides what it has reported.

    It `began` at a step, or from nothing (None); its last complete step is None if that is not known.
    """

    number: int
    began: int | None
    reached: int | None
    running: bool


def badges_in(noted: Iterable[tuple[int, str, Mapping[str, Any]]]) -> dict[int, Badge]:
    """Return the badges by the start's number, of (start, kind, data) of events "verified" and "diverged"."""
    badges: dict[int, Badge] = {}
    for start, kind, data in noted:
        if misfit(kind, data):
            continue  # an older version of everstep shipped it
        before = badges.get(start, Badge("not verified"))
        report = data.get("report", "") or before.report
        steps = [at for at in (before.at, data["step"] if kind == "diverged" else None) if at is not None]
        verified: Any = next((kind for kind in REPORTS if report.startswith(REPORTS[kind])), "not verified")
        compared = before.steps or data.get("steps", 0)
        badges[start] = Badge("diverged" if steps else verified, min(steps, default=None), report, compared)
    return badges


def judged(starts: Iterable[Start], reported: Mapping[int, Badge]) -> list[tuple[int | None, Badge]]:
    """Return (last complete step, badge) of each start that trained, in their order, by what they reported.

    A killed start could not record its last steps, but the next start tells of those that it executed again.
    """
    judgements, known = [], list(starts)
    for start, following in zip_longest(known, known[1:]):
        reached, own = start.reached, reported.get(start.number)
        if following is not None and (repeated := reported.get(following.number)) and repeated.steps:
            reached = max(reached or 0, (following.began or 0) + repeated.steps)
        if start.began is None and (own is None or own.kind != "diverged"):
            badge = Badge("first")
        elif own is not None and (own.report or own.kind == "diverged"):
            badge = own
        elif not start.running and reached is not None and reached <= (start.began or 0):
            badge = Badge("nothing to verify", report="this start executed no step")
        else:
            why = "this start ended before its steps were compared with the earlier ones"
            badge = Badge("not verified", report=why)
        judgements.append((reached, badge))
    return judgements
