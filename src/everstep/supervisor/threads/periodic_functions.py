"""Periodic functions of the user, each in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

GRACE = 120.0
"""Seconds that a periodic function may take to end after the loop, as in TensorFlow's Supervisor."""


class PeriodicThread:
    """Runs `fn` at once and then every `seconds`, until stopped or until it fails.

    Carries on TensorFlow's LooperThread.

    Args:
        seconds: interval between starts, counted anew after a call that took longer; 0: back to back.
        fn: called without arguments, in this thread.
        failed: called in this thread with the exception that ended it.
    """

    def __init__(
        self, seconds: float, fn: Callable[[], object], failed: Callable[[BaseException], None]
    ) -> None:
        self._seconds, self._fn, self._failed = seconds, fn, failed
        self._ending = threading.Event()
        self.name = getattr(fn, "__qualname__", repr(fn))
        self._thread = threading.Thread(target=self._run, name=f"everstep-loop-{self.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end after the running call."""
        self._ending.set()

    def join(self, grace: float) -> bool:
        """Wait up to `grace` seconds for the thread's end; return whether it ended."""
        self._thread.join(grace)
        return not self._thread.is_alive()

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while not self._ending.is_set():
                self._fn()
                due = max(due + self._seconds, time.monotonic())
                if self._ending.wait(max(0.0, due - time.monotonic())):
                    return
        except BaseException as error:
            # of any kind: the main thread raises it at the next boundary, with its traceback
            self._failed(error)


class PeriodicThreads:
    """The periodic functions of a run.

    Args:
        failed: called in a thread with the exception that ended its function.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._threads: list[PeriodicThread] = []

    def start(self, seconds: float, fn: Callable[[], object]) -> None:
        """Run `fn` every `seconds`, from now on."""
        self._threads.append(PeriodicThread(seconds, fn, self._failed))

    def stop(self) -> list[str]:
        """End all threads; return the names of those that did not end in time."""
        # all are asked first, so that they end at the same time
        for thread in self._threads:
            thread.stop()
        until = time.monotonic() + GRACE  # for all of them together
        return [thread.name for thread in self._threads if not thread.join(until - time.monotonic())]
