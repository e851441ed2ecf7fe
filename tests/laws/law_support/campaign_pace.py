"""What only a campaign asks of a victim: when it noted what, and to take its time, so that it is hit."""

from __future__ import annotations

import time


def take(seconds: float) -> None:
    """Be slow where a random kill is to strike."""
    if seconds:
        time.sleep(seconds)


def now() -> float:
    """Monotonic seconds, the same clock in every process of the machine."""
    return time.monotonic()
