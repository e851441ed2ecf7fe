"""Make an operation of a save fail, or kill the process there, inside a `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from everstep import hazard


@contextmanager
def armed(spec: str) -> Iterator[None]:
    """Arm one hazard of `everstep.hazard` for the length of the block; none is armed afterwards.

    A process of its own is armed from outside instead, by the variable EVERSTEP_HAZARD.

    Args:
        spec: "kill:checkpoint.rename:2" (SIGKILL at the second time), "ENOSPC:journal.write:3-5"
            (the 3rd to 5th time raise OSError), or "trace:FILE" (append the name of each point that is
            reached, to learn what there is).

    Raises:
        ConfigError: the spec is not of that form.
    """
    hazard.arm(spec)
    try:
        yield
    finally:
        hazard.arm(None)
