"""What became of a run that was disturbed: compared with the undisturbed one, step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from starts import Start, Step

EXACT = "exact"
INEXACT = "inexact"
CRASHED = "crashed"
REFUSED = "refused"
STARTED_OVER = "started over"
UNFINISHED = "unfinished, status 0"
LOADED = "loaded damaged"
HUNG = "hung"
MISSED = "not struck"
NOT_DONE = "not done"

MEANING = {
    EXACT: "same samples, same loss bits at each step, same digests at the end",
    INEXACT: "the program ended with status 0 in another result",
    CRASHED: "the resume ended with an error",
    REFUSED: "the resume ended with an error that names the damaged file, or with a message and no traceback",
    STARTED_OVER: "training began again at step 1, though checkpoints were due",
    UNFINISHED: "it ended with status 0 before its last step, so whoever started it takes it for finished",
    LOADED: "a damaged checkpoint was loaded, and nothing was said",
    HUNG: "the program did not end within the limit",
    MISSED: "the program ended before the strike came, five times",
    NOT_DONE: "this machine cannot strike so",
}
"""Each outcome, and what it says."""


class Difference(NamedTuple):
    """The first difference from the undisturbed run.

    Attributes:
        what: "samples", "loss", "steps" (their number), or the group of a digest, as "weights".
        step: the step; None at the end.
        was, now: the value in the undisturbed and in the disturbed run, shortened.
    """

    what: str
    step: int | None
    was: str
    now: str


def followed(starts: Sequence[Start]) -> list[Step]:
    """Return the steps that led to the result: a resume replaces those that it executes again."""
    history: list[Step] = []
    for start in starts:
        if start.steps:
            history = [step for step in history if step.number < start.steps[0].number]
            history += start.steps
    return history


def first_difference(undisturbed: Start, starts: Sequence[Start]) -> Difference | None:
    """Find the first step, else the first tensor at the end, that differs; None if all is equal."""
    was, now = undisturbed.steps, followed(starts)
    for a, b in zip(was, now, strict=False):
        if a.number != b.number:
            return Difference("steps", a.number, f"step {a.number}", f"step {b.number}")
        if a.samples != b.samples:
            return Difference("samples", a.number, str(a.samples)[:60], str(b.samples)[:60])
        if a.loss != b.loss:
            return Difference("loss", a.number, a.loss, b.loss)
    if len(was) != len(now):
        return Difference("steps", None, str(len(was)), str(len(now)))
    ends, end = undisturbed.end or {}, starts[-1].end or {}
    for path in [*ends, *(end.keys() - ends.keys())]:
        if ends.get(path) != end.get(path):
            group = path.partition("/")[0]
            return Difference(group, None, f"{path} {ends.get(path)}", f"{path} {end.get(path)}")
    return None


def miscounted(undisturbed: Start, starts: Sequence[Start]) -> tuple[int, int]:
    """Count samples that were used too often and too seldom, over the whole training."""
    was = Counter(each for step in undisturbed.steps for each in step.samples)
    now = Counter(each for step in followed(starts) for each in step.samples)
    return (now - was).total(), (was - now).total()


def outcome(
    undisturbed: Start,
    starts: Sequence[Start],
    save_every: int,
    damaged: str = "",
    alone: Start | None = None,
) -> tuple[str, Difference | None]:
    """Judge a run by its starts, of which the last was left alone.

    Args:
        undisturbed: the reference.
        save_every: steps between two checkpoints; a run that has done twice as many has one on its disk.
        damaged: name of the file that was damaged; "" if none was.
        alone: the last start as it was without the damage.
    """
    last = starts[-1]
    if last.status is None:
        return HUNG, None
    if last.status != 0:
        is_told = damaged in last.error if damaged else False
        is_error = last.status < 0 or "Traceback (most recent" in last.words
        return (CRASHED if is_error and not is_told else REFUSED), None
    difference = first_difference(undisturbed, starts)
    if last.end is None:
        return UNFINISHED, difference
    reached = max((step.number for start in starts[:-1] for step in start.steps), default=0)
    if last.resumed_after == 0 and reached >= 2 * save_every:
        return STARTED_OVER, difference
    if difference is None:
        return EXACT, None
    was = None if alone is None else (alone.resumed_after, alone.steps, alone.end)
    if was and last.resumed_after == was[0] and (last.steps, last.end) != was[1:]:
        return LOADED, difference  # the damage took part in what came out
    return INEXACT, difference


def came_to_its_end(undisturbed: Start, struck: Start) -> bool:
    """Whether a start that was struck went on to the end of the training."""
    return struck.status == 0 and struck.end is not None and not is_left_unfinished(undisturbed, struck)


def is_left_unfinished(undisturbed: Start, struck: Start) -> bool:
    """Whether a start that was struck ended with status 0 before the last step."""
    reached = struck.steps[-1].number if struck.steps else 0
    return struck.status == 0 and reached < undisturbed.steps[-1].number
