"""Tools for tests: a clock to set, hazards armed in a block, a block that leaves nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from everstep import hazard
from everstep.supervisor.threads.signals import SIGNALS


class ManualClock:
    """Callable that returns its time in seconds; a stand-in for `time.monotonic`.

    Args:
        now: first time, in seconds.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let some seconds pass."""
        self.now += seconds


@contextmanager
def armed(spec: str) -> Iterator[None]:
    """Arm a hazard of `everstep.hazard` inside the block; EVERSTEP_HAZARD arms another process.

    Args:
        spec: "kill:checkpoint.rename:2" (SIGKILL at the second time), "ENOSPC:journal.write:3-5"
            (the 3rd to 5th time raise OSError), or "trace:FILE" (append the name of each hazard that is
            reached, to learn which there are).
    """
    hazard.arm(spec)
    try:
        yield
    finally:
        hazard.arm(None)


@contextmanager
def nothing_left(settle: float = 0.0) -> Iterator[None]:
    """Require that no thread, file descriptor or changed handler of a signal outlives the block.

    Args:
        settle: seconds to wait for what ends by itself, such as a connection that another process closes.
    """
    resources = _resources()
    yield
    deadline = time.monotonic() + settle
    while (leaks := _resources().items() - resources.items()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not leaks, f"these outlive the block: {', '.join(sorted(name for name, _ in leaks))}"


def _resources() -> dict[str, int]:
    """Map names of threads, open files and signals to what they are now."""
    resources = {f"thread {each.name}": each.ident or 0 for each in threading.enumerate() if each.is_alive()}
    for number in os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else ():
        with suppress(OSError):  # the descriptor by which the folder was listed
            os.fstat(int(number))
            target = "?"
            with suppress(OSError):  # a system that does not say what a descriptor is
                target = os.readlink(f"/dev/fd/{number}")
            resources[f"file {number} -> {target}"] = 0
    return resources | {f"handler of {signal.Signals(n).name}": id(signal.getsignal(n)) for n in SIGNALS}
