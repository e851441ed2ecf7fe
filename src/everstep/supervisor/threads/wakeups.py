"""Wake-ups: what threads and signal handlers may touch, the clock, and periodic functions of the user."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from everstep.contracts.services import Action, Clock, Service
from everstep.group import Agreement

GRACE = 120.0
"""Seconds that a periodic function may take to end after the loop, as in TensorFlow's Supervisor."""
Pending = tuple[Service | None, Action]
"""An action, with the service that asked for it; None: a thread or the program did."""


class Wakeups:
    """Tells the loop when to ask whether anything is due.

    Threads and signal handlers take no lock here: they append to a deque and set plain attributes.  The loop
    compares `next_due` at every step; `actions` of threads are applied at the next boundary.
    """

    def __init__(self, clock: Clock) -> None:
        self.next_due = 0
        self.actions: deque[Pending] = deque()
        self._due_step = 0
        """First step after which a boundary is due by number."""
        self._due_time: float | None = None
        """The clock's time at which a boundary is due."""
        self._woken = False
        self._error: BaseException | None = None
        self._clock = clock
        self._timer: threading.Timer | None = None
        self._timer_at: float | None = None
        """The clock's time at which the timer wakes the loop."""
        self._agreement: Agreement | None = None
        self._keeps_time = True
        """Whether this process looks at the clock: of several ranks only the writer does."""

    def agree_by(self, agreement: Agreement, *, keeps_time: bool) -> None:
        """Let `wish` stop all ranks at one step, instead of this rank alone."""
        self._agreement, self._keeps_time = agreement, keeps_time

    def wish(self) -> None:
        """Make a boundary due for what this rank alone knows; from any thread or signal handler."""
        if self._agreement is None:
            self.wake()
        else:
            self._agreement.wish()

    def look(self) -> None:
        """Make the loop ask after the next step; called by a thread of the agreement."""
        self.next_due = 0

    def wake(self) -> None:
        """Make the next boundary due, on a call that every rank makes; from any thread or signal handler."""
        # in this order: plan() sets next_due, and then looks at _woken
        self._woken = True
        self.next_due = 0

    def fail(self, error: BaseException) -> None:
        """Raise `error` in the main thread at the next boundary; from any thread."""
        self._error = self._error or error
        # not a wish: no other rank is met, because the error is raised first
        self.wake()

    def require_no_error(self) -> None:
        """Raise the first error that a thread reported, once."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def is_due(self, step: int) -> bool:
        due = step >= self._due_step or self._woken
        if not due and self._due_time is not None and self._clock() >= self._due_time:
            due = self._agreement is None
            self.wish()
            self._due_time = None
        # also where a boundary is due by number: the agreed step counts as reached only if asked for
        if self._agreement is not None and self._agreement.ask(step):
            due = True
        if not due:
            self._set_next_due(step)
        return due

    def begin_boundary(self) -> None:
        """Begin a boundary; a wake-up from here on asks for another boundary."""
        self._woken = False

    def plan(self, step: int, due_step: int, due_time: float | None) -> None:
        self._due_step = due_step
        self._due_time = due_time if self._keeps_time else None
        if self._clock is time.monotonic:
            self._set_timer()
        self._set_next_due(step)

    def _set_timer(self) -> None:
        """Let a thread wake the loop when its time has come; the one before ends."""
        if self._timer is not None:
            if self._timer_at == self._due_time and self._timer.is_alive():
                return
            self._timer.cancel()
            self._timer.join()
        self._timer, self._timer_at = None, self._due_time
        if self._due_time is not None:
            left = max(0.0, self._due_time - self._clock())
            self._timer = threading.Timer(min(left, threading.TIMEOUT_MAX), self.wish)
            self._timer.name, self._timer.daemon = "everstep-timer", True
            self._timer.start()

    def _set_next_due(self, step: int) -> None:
        """Set `next_due` to what is known, then lower it by what threads have done meanwhile."""
        if self._due_time is not None and self._clock is not time.monotonic:
            self.next_due = step + 1  # only who made the clock knows when it moves: asked after each step
        else:
            self.next_due = self._due_step
        if self._woken:  # a thread may have woken the loop before next_due was set above
            self.next_due = 0
        elif self._agreement is not None and (ask := self._agreement.next_ask(step)) is not None:
            self.next_due = min(self.next_due, ask)

    def close(self) -> None:
        self._due_time = None
        self._set_timer()


class PeriodicThreads:
    """Runs functions every so often; carries on TensorFlow's LooperThread."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._ending = threading.Event()
        self._threads: dict[threading.Thread, str] = {}

    def start(self, seconds: float, fn: Callable[[], object]) -> None:
        """Run `fn` at once and then every `seconds` from start to start, until stopped or until it fails."""
        name = getattr(fn, "__qualname__", repr(fn))
        thread = threading.Thread(
            target=self._run, args=(seconds, fn), name=f"everstep-loop-{name}", daemon=True
        )
        self._threads[thread] = name
        thread.start()

    def stop(self) -> list[str]:
        """End all threads; return the names of those that did not end in time."""
        self._ending.set()
        until = time.monotonic() + GRACE  # for all of them together
        for thread in self._threads:
            thread.join(until - time.monotonic())
        return [name for thread, name in self._threads.items() if thread.is_alive()]

    def _run(self, seconds: float, fn: Callable[[], object]) -> None:
        due = time.monotonic()
        try:
            while not self._ending.wait(max(0.0, due - time.monotonic())):
                fn()
                due = max(due + seconds, time.monotonic())
        except BaseException as error:
            # of any kind: the main thread raises it at the next boundary, with its traceback
            self._failed(error)
