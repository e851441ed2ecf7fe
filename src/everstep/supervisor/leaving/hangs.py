"""Hangs of a run: a thread notices what does not move, and writes the stacks of all threads."""

from __future__ import annotations

import math
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress

from everstep.contracts.group import Group
from everstep.errors import GroupError
from everstep.record import Journal
from everstep.services.recovery import HangWatch
from everstep.supervisor.leaving.failure_reporter import FailureReporter, stacks, within
from everstep.supervisor.voice import Voice

LONGEST_TICK = 1.0
"""Seconds between two looks; what stops the whole process or the machine counts as one tick."""
_TICKS = 20
"""Least number of looks before something hangs: this thread has run that often, and nothing has moved."""
_WAIT = 6.0
"""Seconds for telling the other ranks, before this one ends: the store may be what hangs."""


class HangThread:
    """Looks at marks that change while the run moves; the main thread makes and closes it.

    The thread reads no clock.  It counts its own wake-ups, and between two of them the
    main thread could have run as well.  Of several ranks each notices its own hang.

    Args:
        watch: the settings.
        marks: functions that return something that changes while a part of the run moves, None while that
            part has nothing to do; by what does not move, as in "NAME for 60 s".  Called in the thread.
        group: the processes that train together.
        reporter, journal, voice: take what is to be said.
    """

    def __init__(
        self,
        watch: HangWatch,
        marks: Mapping[str, Callable[[], object]],
        group: Group,
        reporter: FailureReporter,
        journal: Journal,
        voice: Voice,
    ) -> None:
        self._watch, self._marks, self._group = watch, marks, group
        self._reporter, self._journal, self._voice = reporter, journal, voice
        self._main = threading.get_ident()
        self._tick = min(LONGEST_TICK, watch.after / _TICKS)
        self._limit = math.ceil(watch.after / self._tick)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everstep-hang-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        last: dict[str, object] = {}
        looks = dict.fromkeys(self._marks, 0)
        """Number of looks since each has moved."""
        while not self._ending.wait(self._tick):
            for name, read in self._marks.items():
                now = read()
                looks[name] = looks[name] + 1 if now is not None and now == last.get(name) else 0
                last[name] = now
                if looks[name] == self._limit:  # once, until it moves again
                    self._noticed(name)

    def _noticed(self, name: str) -> None:
        """Say that a part of this rank does not move."""
        what = f"{name} for {self._watch.after:g} s; {self._place()}"
        if self._watch.then == "stop":
            within(_WAIT, lambda: self._tell_all(what))
            self._reporter.end_process("hang", what)
        page = self._reporter.page("hang", what, stacks())
        self._journal.event("hang", {"what": what, "rank": self._group.rank}, wall=True)
        self._journal.flush()
        self._voice.warn(f"hang: {what}; the stacks of all threads are in {page}")

    def _tell_all(self, what: str) -> None:
        """Tell the other ranks, which end as after any lost rank, with their stacks."""
        with suppress(GroupError):  # the store is gone, and so nobody can be told
            self._group.fail(f"hang: {what}")

    def _place(self) -> str:
        """Say where the main thread is."""
        frame = sys._current_frames().get(self._main)
        if frame is None:
            return "the main thread has ended"
        ((file, line, function, _),) = traceback.extract_stack(frame, limit=1)
        return f"the main thread is in {file}:{line} ({function})"
