"""What a victim notes of its own course, line by line, so that a kill can be aimed and classified.

Each phase that begins is a point of `everstep.hazard`, too: "law.body", "law.tail", ...
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from everstep import hazard
from law_support.campaign_pace import now


class Entry(NamedTuple):
    """`phase` began at `time` (monotonic seconds, the same clock in every process of the machine)."""

    time: float
    phase: str
    step: int


class Diary:
    """Appends entries with one unbuffered write each: what was noted survives SIGKILL."""

    def __init__(self, path: str | None) -> None:
        self._fd = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, phase: str, step: int = 0) -> None:
        if self._fd is not None:
            os.write(self._fd, f"{now()} {phase} {step}\n".encode())
        hazard.reach(f"law.{phase}")


def read(path: Path) -> list[Entry]:
    """The whole lines of a diary, none if it was not begun."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [Entry(float(t), phase, int(step)) for t, phase, step in (line.split() for line in lines)]


def phase_of(path: Path) -> str:
    """The last phase that was noted; "start-up" before the first."""
    entries = read(path)
    return entries[-1].phase if entries else "start-up"
