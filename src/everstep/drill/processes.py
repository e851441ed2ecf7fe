"""Processes and temporary folders that must not outlive who made them.

Where /proc exists, processes that were left behind are found by a variable of their environment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_DYING = 10.0
"""Seconds to wait until killed processes have disappeared."""


def with_parent(number: signal.Signals) -> Callable[[], None]:
    """Make the function by which a new process gets a signal when this one dies: on Linux alone."""
    parent = os.getpid()
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def prepare() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
            if os.getppid() != parent:  # it died before
                os._exit(128 + number)

    return prepare


def kill_marked(mark: bytes) -> None:
    """Kill the processes of this user that were started with a variable.

    Args:
        mark: the variable, as b"NAME=VALUE".
    """
    until = time.monotonic() + _DYING
    while (left := with_environment(mark)) and time.monotonic() < until:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def with_environment(mark: bytes) -> list[int]:
    """List the processes of this user that were started with a variable."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # the process ended meanwhile, or belongs to another user
            if mark in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found


@contextmanager
def owned_folder(prefix: str) -> Iterator[Path]:
    """Make a temporary folder, deleted after the block."""
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        yield Path(folder).resolve()
