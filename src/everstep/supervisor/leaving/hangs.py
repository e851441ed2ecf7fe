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
from everstep.group import StoreGroup
from everstep.polling import wait_until
from everstep.record import Journal
from everstep.services.recovery import HALF_AN_HOUR, NINE_MINUTES, HangWatch
from everstep.supervisor.leaving.failure_reporter import FailureReporter, stacks, within
from everstep.supervisor.voice import Voice

LONGEST_TICK = 1.0
"""Seconds between two looks; what stops the whole process or the machine counts as one tick."""
_TICKS = 20
"""Least number of looks before something hangs: this thread has run that often, and nothing has moved."""
_WAIT = 6.0
"""Seconds for telling the other ranks, before this one ends: the store may be what hangs."""
_STAND = 30.0
"""Seconds in which the other ranks notice that they stand, too."""


class HangThread:
    """Looks at marks that change while the run moves; the main thread makes and closes it.

    The thread reads no clock.  It counts its own wake-ups, and between two of them the
    main thread could have run as well.  Of several ranks each notices its own hang, and names where the
    others are.

    Args:
        watch: the settings.
        position: tells the place of the main thread: twice the number of completed steps, and one more inside
            a step; called in the thread.
        marks: functions that return something that changes while a part of the run moves, None while that
            part has nothing to do; by what does not move, as in "NAME for 60 s".  Called in the thread.
        group: the processes that train together.
        reporter, journal, voice: take what is to be said.
    """

    def __init__(
        self,
        watch: HangWatch,
        position: Callable[[], int],
        marks: Mapping[str, Callable[[], object]],
        group: Group,
        reporter: FailureReporter,
        journal: Journal,
        voice: Voice,
    ) -> None:
        self._watch, self._marks, self._group = watch, marks, group
        self._reporter, self._journal, self._voice = reporter, journal, voice
        self._main, self._position = threading.get_ident(), position
        self._after = watch.after or (HALF_AN_HOUR if group.size == 1 else NINE_MINUTES)
        self._tick = min(LONGEST_TICK, self._after / _TICKS)
        self._limit = math.ceil(self._after / self._tick)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everstep-hang-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        last: dict[str, object] = {}
        looks = dict.fromkeys(self._marks, 0)
        """Number of looks since each has moved."""
        while not self._ending.wait(self._tick):
            for name, read in self._marks.items():
                now, stood = read(), looks[name] >= self._limit
                looks[name] = looks[name] + 1 if now is not None and now == last.get(name) else 0
                last[name] = now
                if stood and not looks[name] and isinstance(self._group, StoreGroup):
                    with suppress(GroupError):  # which the main thread finds out
                        self._group.store.delete(f"stands/{self._group.rank}")
                if looks[name] == self._limit:  # once, until it moves again
                    self._noticed(name)

    def _noticed(self, name: str) -> None:
        """Say that a part of this rank does not move."""
        where = self._places(self._group) if isinstance(self._group, StoreGroup) else self._place()
        what = f"{name} for {self._after:g} s; {where}"
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

    def _places(self, group: StoreGroup) -> str:
        """Tell the other ranks where this one stands, and say where each of them does."""
        where = f"waits for all ranks at {group.operation!r}" if group.operation else self._place()
        keys = [f"stands/{rank}" for rank in range(group.size)]
        try:
            group.store.set(keys[group.rank], f"{_place_of(self._position())}: {where}")
            wait_until(lambda: self._ending.is_set() or group.store.has(keys), _STAND)
            said = [group.store.get([key])[0] if group.store.has([key]) else "moves" for key in keys]
        except GroupError as error:
            return f"{where} ({error})"
        return "; ".join(f"rank {rank} {place}" for rank, place in enumerate(said))

    def _place(self) -> str:
        frame = sys._current_frames().get(self._main)
        if frame is None:
            return "the main thread has ended"
        ((file, line, function, _),) = traceback.extract_stack(frame, limit=1)
        return f"the main thread is in {file}:{line} ({function})"


def _place_of(position: int) -> str:
    step, inside = divmod(position, 2)
    return f"inside step {step + 1}" if inside else f"after step {step}"
