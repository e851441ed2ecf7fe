"""Attributes that threads and signal handlers may touch: next due step, wake-ups, actions, errors."""

from __future__ import annotations

import time
from collections import deque

from everstep.contracts.services import Action, Clock, Service
from everstep.supervisor.threads import Ticker


class Wakeups:
    """Tells the loop when to ask whether anything is due.

    Threads and signal handlers interrupt the main thread between any two instructions, so they take no
    lock here: they append to a deque and set plain attributes.

    Args:
        clock: monotonic seconds.

    Attributes:
        next_due: first step after which the loop has to ask; compared at every step.
        actions: actions that threads asked for, oldest first; applied at the next boundary.
    """

    def __init__(self, clock: Clock) -> None:
        self.next_due = 0
        self.actions: deque[tuple[Service | None, Action]] = deque()
        self._due_step = 0
        """First step after which a boundary is due by number."""
        self._due_time: float | None = None
        """The clock's time at which a boundary is due."""
        self._woken = False
        self._error: BaseException | None = None
        self._clock = clock
        self._ticker = Ticker(clock, self.wake)

    def wake(self) -> None:
        """Make the next boundary due; from any thread or signal handler."""
        # in this order: plan() sets next_due, and then looks at _woken
        self._woken = True
        self.next_due = 0

    def fail(self, error: BaseException) -> None:
        """Raise `error` in the main thread at the next boundary; from any thread."""
        self._error = self._error or error
        self.wake()

    def require_no_error(self) -> None:
        """Raise the first error that a thread reported, once."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def is_due(self, step: int) -> bool:
        """Whether a boundary is due after `step`; asked where `next_due` is reached."""
        if step >= self._due_step or self._woken:
            return True
        if self._due_time is not None and self._clock() >= self._due_time:
            return True
        self.next_due = step + 1
        return False

    def begin_boundary(self) -> None:
        """Begin a boundary; a wake-up from here on asks for another boundary."""
        self._woken = False

    def plan(self, step: int, due_step: int, due_time: float | None) -> None:
        """Plan the next boundary, at the end of this one.

        Args:
            step: the last completed step.
            due_step: first step after which something is due by number.
            due_time: the clock's time at which something is due; None: never.
        """
        self._due_step = self.next_due = due_step
        self._due_time = due_time
        if self._clock is time.monotonic:
            self._ticker.set(due_time)
        elif due_time is not None:
            self.next_due = step + 1  # only who made the clock knows when it moves: asked after each step
        if self._woken:  # a thread may have woken the loop before next_due was set above
            self.next_due = 0

    def close(self) -> None:
        """End the thread that watches the clock."""
        self._ticker.close()
