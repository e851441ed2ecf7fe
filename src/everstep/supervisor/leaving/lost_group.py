"""Leaving where the group is lost: another rank, or the store, is gone, and no step can be completed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from everstep.contracts.group import Group
from everstep.group import failure_of_another
from everstep.supervisor.leaving.failure_reporter import FailureReporter

GRACE = 3.0
"""Seconds for the main thread to come back: by an error of its collective, or at its next question."""
LEAVING = 5.0
"""Seconds from the loss in which a main thread that has come back has to leave the loop."""


class LostGroup:
    """Ends this process where the group is lost and the main thread does not come back.

    A collective with a lost rank may wait for minutes (the time limit of gloo and nccl), and no Python code
    can end it.  With the seconds in which a loss is noticed, and those of the last words, all ranks have left
    within 10 seconds.

    The main thread makes it before the `Agreement` that calls `lost`, and closes it after that.

    Args:
        group: the group.
        reporter: ends the process.
        give_up: takes the reason for which nothing can be saved any more, in words.
    """

    def __init__(self, group: Group, reporter: FailureReporter, give_up: Callable[[str], None]) -> None:
        self._group, self._reporter, self._give_up = group, reporter, give_up
        self._leaving, self._closed = threading.Event(), threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def lost(self, error: BaseException) -> None:
        """Begin to watch the main thread: the group is lost by `error`; from any thread."""
        with self._starting:
            if self._thread is not None:
                return
            # first: torchrun sends SIGTERM to all other ranks soon after
            self._give_up(str(error))
            self._thread = threading.Thread(
                target=self._watch, args=(error,), name="everstep-lost", daemon=True
            )
            self._thread.start()

    def leaving(self, error: BaseException | None = None) -> None:
        """Note that the main thread leaves the loop on its own.

        Args:
            error: the exception by which this rank leaves; the group is lost by it, so the rank has to hurry.
        """
        self._leaving.set()
        if error is not None and self._group.size > 1:
            self.lost(error)

    def close(self) -> None:
        """End the thread: the main thread has left the loop."""
        self._leaving.set()
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, error: BaseException) -> None:
        lost = time.monotonic()
        # now: the rank that hosts the store may leave first
        cause = failure_of_another(self._group)
        if not self._leaving.wait(GRACE):
            said = f"the main thread did not come back within {GRACE:g} s of the loss: {error}"
            self._reporter.end_process("lost", said, cause)
        if not self._closed.wait(lost + LEAVING - time.monotonic()):
            said = f"the main thread did not leave the loop within {LEAVING:g} s of the loss: {error}"
            self._reporter.end_process("lost", said, cause)
