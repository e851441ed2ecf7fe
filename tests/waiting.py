"""Waiting for what another thread or process does (rule 3), and a product that waits as well."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")

PATIENCE = 120.0
"""Seconds after which a wait is a hang: they end a test and decide no verdict."""
_GLANCE = 0.02


def until(condition: Callable[[], T]) -> T:
    """Wait until `condition()` is true, and return it; in between others have the processor."""
    pause = threading.Event()
    for _ in range(int(PATIENCE / _GLANCE)):
        if found := condition():
            return found
        pause.wait(_GLANCE)
    raise AssertionError(f"it has not come to that in {PATIENCE:g} s")


def left_open(folder: Path) -> list[str]:
    """Files below a folder that this process has open, and threads of everstep's.

    By their names: what earlier tests have left, and what torch opens for itself, comes and goes meanwhile.
    """
    files = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    names = [thread.name for thread in threading.enumerate()]
    return [path for path in files if str(folder) in path] + [n for n in names if n.startswith("everstep")]


TREES = os.pathsep.join(map(str, {Path(__file__).resolve().parents[1], Path(sys.prefix).resolve().parent}))
IN_TIME = ("record.provenance.GIT_SECONDS",)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the product leaves out where it takes too many seconds is done, however slow the machine is.

    And a start does not ask git for the state of the repository of these tests: that takes longer than a
    small training.
    """
    for name in IN_TIME:
        monkeypatch.setattr(f"everstep.{name}", PATIENCE)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", TREES)
