"""Signals that end a command in order."""

from __future__ import annotations

import signal


def leave_in_order() -> None:
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does, so that it ends what it has started."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _leave)


def _leave(number: int, frame: object) -> None:
    for other in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + number)
