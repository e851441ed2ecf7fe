"""What a failing process reports, and threads that end a process whose main thread does not come back."""

from __future__ import annotations

import math
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NoReturn

from everstep.contracts.group import Group
from everstep.errors import GroupError
from everstep.group import StoreGroup, failure_of_another, report, write_error_file
from everstep.polling import wait_until
from everstep.record import FailurePages, Journal, traceback_lines
from everstep.record.pages import Kind
from everstep.redaction import redacted
from everstep.services.console import Voice
from everstep.services.recovery import HALF_AN_HOUR, NINE_MINUTES, HangWatch
from everstep.supervisor.saving.state_tree import Progress

PATIENCE = 4.0
"""Seconds for the report of a process that ends itself: a disk or a pipe may be what hangs."""
LEAVING = 5.0
"""Seconds from the loss of the group in which the main thread has to leave the loop."""
_TICKS = 20
"""Least number of looks before something hangs: this thread has run that often, and nothing has moved."""
_TELLING = 6.0
"""Seconds for telling the other ranks of a hang, before this one ends: the store may be what hangs."""
_STAND = 30.0
"""Seconds in which the other ranks notice that they stand, too."""


class FailureReporter:
    """Reports a failure to the journal, `failures/`, torchrun's error file and the other ranks.

    The main thread sets `leaving` where it begins to leave the loop, and `has_left` before it closes the
    `Agreement`.  `give_up` is called with the reason where no save can succeed any more.
    """

    def __init__(
        self,
        pages: FailurePages,
        group: Group,
        progress: Progress,
        journal: Journal,
        voice: Voice,
        give_up: Callable[[str], None],
    ) -> None:
        self._pages, self._progress, self._give_up = pages, progress, give_up
        self.leaving, self.has_left = threading.Event(), threading.Event()
        self.group, self.journal, self.voice = group, journal, voice
        self._reported: BaseException | None = None
        self._cause: str | None = None

    def report(self, error: BaseException) -> None:
        """Tell the other ranks, once, that this rank fails; or find the failure that `error` follows from."""
        if self._reported is None:
            self._reported, self._cause = error, report(self.group, error)

    def describe_failure(self, error: BaseException) -> str:
        """Report the exception that ends the loop; return it in words, with its cause."""
        self.report(error)
        what, lines = f"{type(error).__name__}: {error}", traceback_lines(error)
        self.page("error", what, lines, self._cause)
        write_error_file(_with_cause(what, self._cause), lines)
        return _with_cause(what, self._cause)

    def page(self, kind: Kind, what: str, lines: list[str], cause: str | None = None) -> str:
        """Write a page; return its path, or why there is none, for a message."""
        step, epoch = self._progress.step, self._progress.epoch
        try:
            return str(self._pages.write(kind, what, lines, cause=cause, step=step, epoch=epoch))
        except OSError as error:
            self.voice.warn(f"the page of a failure could not be written ({error}): {what}")
            return f"nowhere ({error})"

    def end_process(self, kind: Kind, what: str, cause: str | None = None) -> NoReturn:
        """End this process with exit status 1, from a thread: its main thread is in the middle of a step."""
        lines = stacks()

        def write_report() -> None:  # what may hang comes last
            self.page(kind, what, lines, cause)
            reason = _with_cause(what, cause)
            write_error_file(reason, lines)
            at = {"step": self._progress.step, "epoch": self._progress.epoch}
            self.journal.event("closed", {"status": "failed", "reason": reason, **at}, wall=True)
            self.journal.flush()
            print(*redacted(lines), f"everstep: {reason}", sep="\n", file=sys.stderr, flush=True)
            sys.stdout.flush()

        _call_within(PATIENCE, write_report)
        os._exit(1)

    def await_leaving(self, error: BaseException) -> None:
        """End this process, whose group is lost by `error`, if its main thread does not leave the loop soon.

        A collective with a lost rank may wait for minutes (the time limit of gloo and nccl), and no Python
        code can end it.  With the seconds in which a loss is noticed, all ranks have left within 10 seconds.
        """
        # first: torchrun sends SIGTERM to all other ranks soon after
        self._give_up(str(error))
        # now: the rank that hosts the store may leave first
        cause = failure_of_another(self.group)
        if not self.has_left.wait(LEAVING):
            what = f"the main thread did not leave the loop within {LEAVING:g} s of the loss: {error}"
            self.end_process("lost", what, cause)


def stacks() -> list[str]:
    """Return the stack of each thread of this process, the main thread first, in the form of a traceback."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    lines: list[str] = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        lines.append(f"Thread {names.get(ident, ident)!r} (most recent call last):")
        lines += ["".join(traceback.format_stack(frame)).rstrip(), ""]
    return "\n".join(lines).splitlines()


def _call_within(seconds: float, action: Callable[[], object]) -> None:
    """Call `action` in a thread, and wait for up to `seconds`: what it touches may be what hangs."""
    thread = threading.Thread(target=action, name="everstep-failure", daemon=True)
    thread.start()
    thread.join(seconds)


def _with_cause(what: str, cause: str | None) -> str:
    return what if cause is None else f"{what} (a consequence of {cause})"


class HangThread:
    """Looks at marks that change while the run moves; the main thread makes and closes it.

    The thread reads no clock.  It counts its own wake-ups, and between two of them the main thread could have
    run as well: what stops the whole process or the machine counts as one.

    Args:
        position: the place of the main thread: twice the number of completed steps, one more inside one.
        marks: functions that return something that changes while a part of the run moves, None while that
            part has nothing to do; by what does not move, as in "NAME for 60 s".
    """

    def __init__(
        self,
        watch: HangWatch,
        position: Callable[[], int],
        marks: Mapping[str, Callable[[], object]],
        reporter: FailureReporter,
    ) -> None:
        self._watch, self._position, self._marks = watch, position, marks
        self._reporter, self._group = reporter, reporter.group
        self._main = threading.get_ident()
        self._timeout = watch.after or (HALF_AN_HOUR if self._group.size == 1 else NINE_MINUTES)
        self._tick = min(1.0, self._timeout / _TICKS)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everstep-hang-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        limit = math.ceil(self._timeout / self._tick)
        last: dict[str, object] = {}
        looks = dict.fromkeys(self._marks, 0)
        """Number of looks since each has moved."""
        while not self._ending.wait(self._tick):
            for name, read_mark in self._marks.items():
                mark, was_hanging = read_mark(), looks[name] >= limit
                looks[name] = looks[name] + 1 if mark is not None and mark == last.get(name) else 0
                last[name] = mark
                if was_hanging and not looks[name] and isinstance(self._group, StoreGroup):
                    with suppress(GroupError):  # which the main thread finds out
                        self._group.store.delete(f"stands/{self._group.rank}")
                if looks[name] == limit:  # once, until it moves again
                    self._report_hang(name)

    def _report_hang(self, name: str) -> None:
        where = self._places(self._group) if isinstance(self._group, StoreGroup) else self._place()
        what, reporter = f"{name} for {self._timeout:g} s; {where}", self._reporter
        if self._watch.then == "stop":
            _call_within(_TELLING, lambda: self._tell_all(what))
            reporter.end_process("hang", what)
        page = reporter.page("hang", what, stacks())
        reporter.journal.event("hang", {"what": what, "rank": self._group.rank}, wall=True)
        reporter.journal.flush()
        reporter.voice.warn(f"hang: {what}; the stacks of all threads are in {page}")

    def _tell_all(self, what: str) -> None:
        """Tell the other ranks, which end as after any lost rank, with their stacks."""
        with suppress(GroupError):  # the store is gone, and so nobody can be told
            self._group.fail(f"hang: {what}")

    def _places(self, group: StoreGroup) -> str:
        """Tell the other ranks where this one stands, and say where each of them does."""
        where = f"waits for all ranks at {group.operation!r}" if group.operation else self._place()
        step, inside = divmod(self._position(), 2)
        at = f"inside step {step + 1}" if inside else f"after step {step}"
        keys = [f"stands/{rank}" for rank in range(group.size)]
        try:
            group.store.set(keys[group.rank], f"{at}: {where}")
            wait_until(lambda: self._ending.is_set() or group.store.has(keys), _STAND)
            places = [group.store.get([key])[0] if group.store.has([key]) else "moves" for key in keys]
        except GroupError as error:
            return f"{where} ({error})"
        return "; ".join(f"rank {rank} {place}" for rank, place in enumerate(places))

    def _place(self) -> str:
        frame = sys._current_frames().get(self._main)
        if frame is None:
            return "the main thread has ended"
        ((file, line, function, _),) = traceback.extract_stack(frame, limit=1)
        return f"the main thread is in {file}:{line} ({function})"
