"""Signals: the handler only sets a flag; the loop acts at the next boundary."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from everstep.errors import Interrupted
from everstep.group import exit_status, launched
from everstep.polling import SHORT_PAUSE, wait_until

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
)
REPEATED = 30.0
"""Seconds for which torchrun waits between the signal that it passes on to the ranks and SIGKILL."""
_installed: list[SignalWatch] = []
"""Watches of all open loops, also of several runs in one process: each sees each signal."""
_previous: dict[int, Any] = {}
"""Handlers from before the first watch was installed."""


def _reset_in_child() -> None:
    """Restore the handlers in a forked child (a loader worker), which must not run the parent's."""
    for watch in _installed[::-1]:
        watch.restore()


os.register_at_fork(after_in_child=_reset_in_child)


class SignalWatch:
    """Turns SIGINT, SIGTERM, SIGHUP and SIGUSR1 into a flag, for the length of a `with` block.

    The first signal asks for a save at the next boundary.  The second, unless it is SIGUSR1, ends the
    process at once through the signal's default action (in an interactive session: `KeyboardInterrupt`);
    what is committed on disk is whole, whatever was being written.  Under torchrun a second one within
    `REPEATED` seconds does nothing: Slurm signals the ranks and torchrun, which signals the ranks again.

    `wake` is called from the handler, and must only set plain attributes.
    """

    def __init__(self, wake: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.received: int | None = None
        """Number of the first signal."""
        self.hopeless: str | None = None
        """Why no save can succeed any more, in words; None while one can."""
        self._wake, self._clock, self._received_at = wake, clock, 0.0
        self._alarm: Any = None
        """Handler of SIGALRM before `limit`; None while there is no limit."""

    def install(self) -> None:
        """Install the handlers; not outside the main thread, where Python allows none."""
        if threading.current_thread() is not threading.main_thread():
            return
        if not _installed:
            for number in SIGNALS:
                # an ignored signal stays ignored, as SIGHUP is under nohup
                if signal.getsignal(number) is not signal.SIG_IGN:
                    _previous[number] = signal.signal(number, _handle)
        _installed.append(self)

    def restore(self) -> None:
        """Put back the handlers that were there before, unless another loop is still open."""
        if self not in _installed:
            return
        _installed.remove(self)
        if not _installed:
            for number, handler in _previous.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            _previous.clear()

    def limit(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` in the main thread in some seconds; not where the program has a timer of its own."""
        if self in _installed and not signal.getitimer(signal.ITIMER_REAL)[0]:
            previous = signal.signal(signal.SIGALRM, lambda number, frame: act())
            self._alarm = signal.SIG_DFL if previous is None else previous  # None: not made by Python
            signal.setitimer(signal.ITIMER_REAL, seconds)

    def end_limit(self) -> None:
        if self._alarm is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._alarm)
            self._alarm = None

    def receive(self, number: int) -> None:
        self.received, self._received_at = number, self._clock()
        self._wake()

    def is_repeated(self) -> bool:
        """Whether a signal that comes now may be torchrun's, which repeats the one received."""
        return launched() and self._clock() < self._received_at + REPEATED

    def give_up(self, reason: str) -> None:
        """Take no further signal for a preemption (such as torchrun's, when a rank has died); any thread."""
        self.hopeless = reason

    def received_within(self, seconds: float) -> bool:
        return wait_until(lambda: self.received is not None, seconds, SHORT_PAUSE)


def _handle(number: int, frame: FrameType | None) -> None:
    if hopeless := [watch.hopeless for watch in _installed if watch.hopeless is not None]:
        _say(f"{describe(number)}: nothing can be saved, and this process is already ending: {hopeless[0]}")
        return
    waiting = [watch for watch in _installed if watch.received is None]
    for watch in waiting:
        watch.receive(number)
    if waiting:
        again = "" if launched() or number == signal.SIGUSR1 else "; send it again to end at once"
        _say(f"{describe(number)}: saving at the next boundary{again}")
    elif any(watch.is_repeated() for watch in _installed):
        return
    elif number == signal.SIGUSR1:
        return  # a notice, as of a scheduler (Slurm's), which may follow its SIGTERM: it asks for a save, too
    elif is_interactive():
        raise KeyboardInterrupt
    else:
        # nothing to protect: what is committed is whole at any instant
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _say(sentence: str) -> None:
    with suppress(OSError):  # not print: the main thread may be inside a print
        os.write(2, f"\n{sentence}\n".encode())


def is_interactive() -> bool:
    """Whether a person works in this process and wants to keep it: Python's prompt, or a notebook."""
    return hasattr(sys, "ps1")  # a notebook's shell sets it, too; a script that imports Jupyter does not


def exit_error(code: int, reason: str) -> BaseException:
    """Make the exception that leaves a saved run; after Ctrl-C an interactive session continues."""
    if code == 128 + signal.SIGINT and is_interactive():
        return KeyboardInterrupt(reason)
    return Interrupted(exit_status(code), reason)


def describe(number: int) -> str:
    """Name of a signal, with the key that usually sends it."""
    name = signal.Signals(number).name
    return "Ctrl-C (SIGINT)" if name == "SIGINT" else name
