"""`nothing_left`: a check that no thread, file handle or signal handler outlives a block."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from everstep.supervisor.threads.signals import SIGNALS


class _Held(NamedTuple):
    threads: frozenset[str]
    files: frozenset[str]
    handlers: dict[int, Any]


@contextmanager
def nothing_left(settle: float = 0.0) -> Iterator[None]:
    """Require that the block gives back all that it takes.

    Compares the living threads, the open file descriptors (if the system lists them), and the handlers of the
    signals that everstep handles, before and after.

    Args:
        settle: seconds to wait for what ends by itself, such as a connection that another process closes.

    Raises:
        AssertionError: names what is left; if the block itself raises, its error is raised instead.
    """
    before = _held()
    yield
    until = time.monotonic() + settle
    while (left := _left(before, _held())) and time.monotonic() < until:
        time.sleep(0.02)
    assert not left, left


def _left(before: _Held, after: _Held) -> str:
    """Say what is left, "" if nothing is."""
    if threads := after.threads - before.threads:
        return f"these threads outlive the block: {', '.join(sorted(threads))}"
    if files := after.files - before.files:
        return f"these files are still open: {', '.join(sorted(files))}"
    changed = [signal.Signals(n).name for n in SIGNALS if before.handlers[n] is not after.handlers[n]]
    return f"these signals have other handlers than before: {', '.join(changed)}" if changed else ""


def _held() -> _Held:
    threads = frozenset(f"{t.name} ({t.ident})" for t in threading.enumerate() if t.is_alive())
    return _Held(threads, frozenset(_open_files()), {n: signal.getsignal(n) for n in SIGNALS})


def _open_files() -> Iterator[str]:
    folder = "/dev/fd"
    if os.path.isdir(folder):
        for number in os.listdir(folder):
            with suppress(OSError):  # the descriptor by which the folder was listed
                os.fstat(int(number))
                yield f"{number} -> {_target(os.path.join(folder, number))}"


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:  # a system that lists descriptors without saying what they are
        return "?"
