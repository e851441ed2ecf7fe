"""Recordings of torch.profiler, for the service `Profile`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_LEVEL = "KINETO_LOG_LEVEL"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the profiler's messages on standard error, unless the user has set their level.

    The profiler reads the variable once, when it is first used.
    """
    if _LEVEL in os.environ:
        yield
        return
    os.environ[_LEVEL] = "6"
    try:
        yield
    finally:
        del os.environ[_LEVEL]


class Trace:
    """Recording that begins when it is made."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            activities.append(ProfilerActivity.CUDA)
        with _quiet():
            self._profile = profile(activities=activities)
            self._profile.start()

    def stop(self) -> None:
        """End the recording."""
        self._profile.stop()

    def export(self, path: Path) -> None:
        """Write the recording as a Chrome trace; called after `stop`."""
        self._profile.export_chrome_trace(str(path))
