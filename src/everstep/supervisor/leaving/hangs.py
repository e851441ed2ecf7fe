"""Hangs of a run: their stacks, an event, a warning or the end of the process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from everstep.contracts.group import Group
from everstep.errors import GroupError
from everstep.group import GroupNews, HangNews, NoNews
from everstep.record import Journal
from everstep.services.recovery import HangWatch
from everstep.supervisor.leaving.last_words import LastWords, within
from everstep.supervisor.threads.hang_thread import HangThread
from everstep.supervisor.threads.stacks import stacks
from everstep.supervisor.voice import Voice

WAIT = 6.0
"""Seconds for the other ranks to write their stacks, before this one ends: the store may be what hangs."""


class Hangs:
    """Watches a run for hangs, in a thread; the main thread makes and closes it.

    Args:
        watch: the settings; None: nothing is watched, and no thread is started.
        marks: functions that return something that changes while a part of the run moves, None while that
            part has nothing to do; by what does not move, as in "NAME for 60 s".
        group: the processes that train together.
        last_words, journal, voice: take what is to be said.
    """

    def __init__(
        self,
        watch: HangWatch | None,
        marks: Mapping[str, Callable[[], object]],
        group: Group,
        last_words: LastWords,
        journal: Journal,
        voice: Voice,
    ) -> None:
        self._watch, self._group = watch, group
        self._last_words, self._journal, self._voice = last_words, journal, voice
        self._main = threading.get_ident()
        self._where: str | None = None
        """The page with the stacks of this rank, since something last moved."""
        self._news: HangNews = NoNews()
        self._thread: HangThread | None = None
        if watch is not None:
            self._news = NoNews() if group.size == 1 else GroupNews(group)
            self._thread = HangThread(watch.after, marks, self._noticed, self._listen, self._moving)

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.close()

    def _noticed(self, name: str) -> None:
        """Say that a part of this rank does not move."""
        assert self._watch is not None
        what = f"{name} for {self._watch.after:g} s; {self._place()}"
        if self._watch.then == "stop":
            within(WAIT, lambda: self._tell_all(what))
            self._last_words.end_process("hang", what)
        where = self._write(what, None)
        self._journal.event("hang", {"what": what, "rank": self._group.rank}, wall=True)
        self._journal.flush()
        self._voice.warn(f"hang: {what}; the stacks of all threads are in {where}")
        self._news.tell(what)

    def _tell_all(self, what: str) -> None:
        """Let all ranks write their stacks before this one ends."""
        self._news.tell(what)
        self._news.written()
        self._news.await_all()
        with suppress(GroupError):  # the store is gone, and so nobody can be told
            self._group.fail(f"hang: {what}")

    def _listen(self) -> None:
        """Write the stacks of this rank where another one hangs."""
        if self._where is None and (told := self._news.told()) is not None:
            self._write("another rank hangs; this one stands here", told)

    def _write(self, what: str, cause: str | None) -> str:
        if self._where is None:
            self._where = self._last_words.page("hang", what, stacks(), cause)
            self._news.written()
        return self._where

    def _moving(self) -> None:
        self._where = None
        self._news.over()

    def _place(self) -> str:
        """Say where the main thread stands."""
        frame = sys._current_frames().get(self._main)
        if frame is None:
            return "the main thread has ended"
        code = frame.f_code
        return f"the main thread is in {code.co_filename}:{frame.f_lineno} ({code.co_name})"
