"""Badges: how the resume of each start was verified, in the words that commands and the page use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

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
        previous = badges.get(start, Badge("not verified"))
        report = data.get("report", "") or previous.report
        steps = [at for at in (previous.at, data["step"] if kind == "diverged" else None) if at is not None]
        verified: Any = next((kind for kind in REPORTS if report.startswith(REPORTS[kind])), "not verified")
        count = previous.steps or data.get("steps", 0)
        badges[start] = Badge("diverged" if steps else verified, min(steps, default=None), report, count)
    return badges


def judge_starts(starts: Iterable[Start], reported: Mapping[int, Badge]) -> list[tuple[int | None, Badge]]:
    """Return (last complete step, badge) of each start that trained, in their order, by what they reported.

    A killed start could not record its last steps, but the next start tells of those that it executed again.
    """
    judgements, ordered = [], list(starts)
    for start, following in zip_longest(ordered, ordered[1:]):
        reached, own_badge = start.reached, reported.get(start.number)
        if following is not None and (verdict := reported.get(following.number)) and verdict.steps:
            reached = max(reached or 0, (following.began or 0) + verdict.steps)
        if start.began is None and (own_badge is None or own_badge.kind != "diverged"):
            badge = Badge("first")
        elif own_badge is not None and (own_badge.report or own_badge.kind == "diverged"):
            badge = own_badge
        elif not start.running and reached is not None and reached <= (start.began or 0):
            badge = Badge("nothing to verify", report="this start executed no step")
        else:
            reason = "this start ended before its steps were compared with the earlier ones"
            badge = Badge("not verified", report=reason)
        judgements.append((reached, badge))
    return judgements
