"""Periodic functions of the user, each in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

GRACE = 120.0
"""Seconds that a periodic function may take to end after the loop, as in TensorFlow's Supervisor."""


class PeriodicThreads:
    """Runs functions every so often; carries on TensorFlow's LooperThread."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._ending = threading.Event()
        self._threads: dict[threading.Thread, str] = {}

    def start(self, seconds: float, fn: Callable[[], object]) -> None:
        """Run `fn` at once and then every `seconds` (0: back to back), until stopped or until it fails.

        The interval is that between starts, counted anew after a call that took longer.
        """
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
            while not self._ending.is_set():
                fn()
                due = max(due + seconds, time.monotonic())
                if self._ending.wait(max(0.0, due - time.monotonic())):
                    return
        except BaseException as error:
            # of any kind: the main thread raises it at the next boundary, with its traceback
            self._failed(error)
