"""Signals that end a command in order, and exit statuses in words."""

from __future__ import annotations

import signal
from contextlib import suppress

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask a training to save and to end."""

_STATUS = {0: "finished", 3: "out of time", 4: "requirement not met"}


def leave_in_order() -> None:
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does, so that it ends what it has started."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _leave)


def _leave(number: int, frame: object) -> None:
    for other in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + number)


def number_of(error: BaseException) -> int:
    """Return the number of the signal that ends this process by an exception, after `leave_in_order`.

    That is SIGTERM for an exception without a signal.
    """
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 0
    return code - 128 if code - 128 in ASKING else signal.SIGTERM


def in_words(status: int) -> str:
    """Say how a training ended, from its exit status; -N is signal N, and so is 128 + N, as in shells."""
    with suppress(ValueError):  # the status is not a signal's
        number = signal.Signals(-status if status < 0 else status - 128)
        asked = status > 0 and number in ASKING
        return f"{'stopped' if asked else 'killed'} by {number.name}"
    return _STATUS.get(status, "failed")
