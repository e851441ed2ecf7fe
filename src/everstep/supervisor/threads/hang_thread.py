"""A thread that notices what does not move any more."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping

LONGEST_TICK = 1.0
"""Seconds between two looks; what stops the whole process or the machine counts as one tick."""
_TICKS = 20
"""Least number of looks before something hangs: this thread has run that often, and nothing has moved."""


class HangThread:
    """Looks at marks that change while the run moves, and tells when one has stood still for too long.

    The thread reads no clock.  It counts the times that it woke up by itself, and between two of them the
    main thread could have run as well.

    Args:
        after: seconds.
        marks: functions that return something that changes, or None while there is nothing that should move;
            by name; called in the thread.
        noticed: called in the thread with the name of a mark that has stood still for `after` seconds; once,
            until it moves again.
        standing: called in the thread at each look at which a mark has stood still for half of it.
        moving: called in the thread when nothing stands still any more, after `standing` was called.
    """

    def __init__(
        self,
        after: float,
        marks: Mapping[str, Callable[[], object]],
        noticed: Callable[[str], None],
        standing: Callable[[], None],
        moving: Callable[[], None],
    ) -> None:
        self._tick = min(LONGEST_TICK, after / _TICKS)
        self._limit = math.ceil(after / self._tick)
        self._marks = {name: _Mark(read) for name, read in marks.items()}
        self._noticed, self._standing, self._moving = noticed, standing, moving
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everstep-hang-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        stood = False
        while not self._ending.wait(self._tick):
            for name, mark in self._marks.items():
                if mark.look() == self._limit:
                    self._noticed(name)
            stands = any(mark.ticks >= self._limit / 2 for mark in self._marks.values())
            if stands:
                self._standing()
            elif stood:
                self._moving()
            stood = stands


class _Mark:
    def __init__(self, read: Callable[[], object]) -> None:
        self._read = read
        self._last: object = None
        self.ticks = 0
        """Number of looks since it has moved."""

    def look(self) -> int:
        found = self._read()
        self.ticks = self.ticks + 1 if found is not None and found == self._last else 0
        self._last = found
        return self.ticks
