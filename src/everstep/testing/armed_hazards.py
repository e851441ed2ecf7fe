"""Hazards armed inside a `with` block: an operation of a save fails, or the process is killed there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from everstep import hazard


@contextmanager
def armed(spec: str) -> Iterator[None]:
    """Arm a hazard of `everstep.hazard` inside the block; none is armed afterwards.

    To arm another process, set the environment variable EVERSTEP_HAZARD for that process.

    Args:
        spec: "kill:checkpoint.rename:2" (SIGKILL at the second time), "ENOSPC:journal.write:3-5"
            (the 3rd to 5th time raise OSError), or "trace:FILE" (append the name of each hazard that is
            reached, to learn which there are).

    Raises:
        ConfigError: the spec has another form.
    """
    hazard.arm(spec)
    try:
        yield
    finally:
        hazard.arm(None)
