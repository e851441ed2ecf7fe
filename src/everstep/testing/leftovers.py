"""`nothing_left`: no thread, file handle or signal handler outlives a block."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from everstep.supervisor.signals import SIGNALS


class _Held(NamedTuple):
    threads: frozenset[str]
    files: frozenset[str]
    handlers: dict[int, Any]


@contextmanager
def nothing_left() -> Iterator[None]:
    """Require that the block gives back whatever it takes, also where it raises.

    Looked at: living threads, open file descriptors (where the system lists them), and the handlers of
    the signals that everstep handles.

    Raises:
        AssertionError: names what is left; not where the block itself raises.
    """
    before = _held()
    yield
    after = _held()
    threads, files = after.threads - before.threads, after.files - before.files
    assert not threads, f"these threads outlive the block: {', '.join(sorted(threads))}"
    assert not files, f"these files are still open: {', '.join(sorted(files))}"
    left = [signal.Signals(n).name for n in SIGNALS if before.handlers[n] is not after.handlers[n]]
    assert not left, f"these signals have other handlers than before: {', '.join(left)}"


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
