"""Reports of a process that fails: a page in `failures/`, torchrun's error file, the log."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

from everstep.contracts.group import Group
from everstep.group import report, write_error_file
from everstep.record import FailurePages, Journal, traceback_lines
from everstep.record.failure_pages import Kind
from everstep.redaction import redacted
from everstep.supervisor.saving.state_tree import Progress
from everstep.supervisor.voice import Voice

PATIENCE = 4.0
"""Seconds for the report of a process that ends itself: a disk or a pipe may be what hangs."""


class FailureReporter:
    """Reports a failure to the journal, `failures/` and the other ranks."""

    def __init__(
        self, pages: FailurePages, group: Group, progress: Progress, journal: Journal, voice: Voice
    ) -> None:
        self._pages, self._group, self._progress = pages, group, progress
        self._journal, self._voice = journal, voice
        self._reported: BaseException | None = None
        self._cause: str | None = None

    def report(self, error: BaseException) -> None:
        """Tell the other ranks, once, that this rank fails; or find the failure that `error` follows from."""
        if self._reported is None:
            self._reported, self._cause = error, report(self._group, error)

    def failed(self, error: BaseException) -> str:
        """Report the exception that ends the loop; return it in words, with its cause."""
        self.report(error)
        what, lines = f"{type(error).__name__}: {error}", traceback_lines(error)
        self.page("error", what, lines, self._cause)
        tell_torchrun(_with_cause(what, self._cause), lines)
        return _with_cause(what, self._cause)

    def page(self, kind: Kind, what: str, lines: list[str], cause: str | None = None) -> str:
        """Write a page; return its path, or why there is none, for a message."""
        current = self._progress
        try:
            return str(
                self._pages.write(kind, what, lines, cause=cause, step=current.step, epoch=current.epoch)
            )
        except OSError as error:
            self._voice.warn(f"the page of a failure could not be written ({error}): {what}")
            return f"nowhere ({error})"

    def end_process(self, kind: Kind, what: str, cause: str | None = None) -> NoReturn:
        """End this process with exit status 1, from a thread, as its main thread does not come back.

        Nothing is saved: the main thread is in the middle of a step.
        """
        lines = stacks()

        def write_report() -> None:  # what may hang comes last
            self.page(kind, what, lines, cause)
            reason = _with_cause(what, cause)
            tell_torchrun(reason, lines)
            at = {"step": self._progress.step, "epoch": self._progress.epoch}
            self._journal.event("closed", {"status": "failed", "reason": reason, **at}, wall=True)
            self._journal.flush()
            print(*redacted(lines), f"everstep: {reason}", sep="\n", file=sys.stderr, flush=True)
            sys.stdout.flush()

        within(PATIENCE, write_report)
        os._exit(1)


def stacks() -> list[str]:
    """Return the stack of each thread of this process, the main thread first, in the form of a traceback.

    A thread inside C code shows the Python line that has called it.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    lines: list[str] = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        lines.append(f"Thread {names.get(ident, ident)!r} (most recent call last):")
        lines += ["".join(traceback.format_stack(frame)).rstrip(), ""]
    return "\n".join(lines).splitlines()


def tell_torchrun(what: str, lines: list[str]) -> None:
    """Write torchrun's error file, without credentials."""
    try:
        write_error_file(redacted(what), redacted(lines))
    except OSError as error:
        print(f"torchrun's error file could not be written ({error})", file=sys.stderr)


def within(seconds: float, action: Callable[[], object]) -> None:
    """Call `action` in a thread, and wait for up to `seconds`: what it touches may be what hangs."""
    thread = threading.Thread(target=action, name="everstep-failure", daemon=True)
    thread.start()
    thread.join(seconds)


def _with_cause(what: str, cause: str | None) -> str:
    return what if cause is None else f"{what} (a consequence of {cause})"
