"""Detection of a loop that asks whether to stop and completes no step, so that nothing ends it."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import get_ident
from typing import NamedTuple

WORKING, BUSY = 10_000, 100_000
"""Rounds in a step that are too many: WORKING where an optimizer made updates, or each round drew a batch;
BUSY where the loop did not wait between them.  A loop that waits (sleeps, or reads) may ask for ever.

A WGAN's critic and PPO's epochs over a rollout ask within one step, up to thousands of times."""
_WAITING = 0.1
"""Part of the time below which a thread on the processor counts as waiting."""


class Work(NamedTuple):
    """Work of a loop so far: updates of the state's optimizers, and batches drawn."""

    updates: int
    drawn: int


class Rounds:
    """Counts the rounds of a loop in the thread that made the counter.

    `work` tells what the loop has done; it is asked only where there is more than one round in a step.
    """

    def __init__(self, work: Callable[[], Work]) -> None:
        self.count = 0
        """Rounds since the loop last completed a step or an epoch."""
        self._most = 1
        self._work = work
        self._thread = get_ident()
        self._place = (-1, -1)
        self._second = self._judged = Work(0, 0)
        self._began = self._used = 0.0

    def asked(self, place: tuple[int, int]) -> str | None:
        """Count a round; return what the rounds were spent on once there are too many, else None."""
        if get_ident() != self._thread:
            return None
        if place != self._place:
            self._place, self._most, self.count = place, max(self._most, self.count), 0
        self.count += 1
        if self.count == 2:
            self._second = self._judged = self._work()
            self._began, self._used = time.monotonic(), time.thread_time()
        return self._verdict() if self.count % WORKING == 0 else None

    @property
    def in_vain(self) -> bool:
        """Whether the loop has never needed this many rounds to complete a step or an epoch."""
        return get_ident() == self._thread and self.count > self._most

    def _verdict(self) -> str | None:
        before, self._judged = self._judged, self._work()
        if made := self._judged.updates - before.updates:
            return f"in which the optimizers of the state made {made:,} updates"
        if self._judged.drawn - self._second.drawn >= self.count - 2:
            return "each of which drew a batch"
        return "between which it did not wait" if self.count >= BUSY and not self._waits() else None

    def _waits(self) -> bool:
        passed = time.monotonic() - self._began
        return time.thread_time() - self._used < _WAITING * passed
