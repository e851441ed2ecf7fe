"""Waiting for a condition that only repeated requests can find out."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_PAUSE = 0.25
"""Seconds between two requests of a rank that has waited for long."""
SHORT_PAUSE = 0.02
"""Seconds between two looks at a variable of this process, which cost nothing."""
LOOK = 1.0
"""Seconds after which a waiting rank looks for the failure of another one."""


def wait_until(
    ready: Callable[[], bool],
    limit: float,
    longest_pause: float = LONGEST_PAUSE,
    look: Callable[[], None] = lambda: None,
) -> bool:
    """Ask `ready` again and again, for up to `limit` seconds; return its last answer.

    The pauses grow with the time waited, up to `longest_pause` seconds; `look` is called each `LOOK` seconds.
    A request of the store that blocks would keep Python from running signal handlers.
    """
    began = looked = time.monotonic()
    while not ready():
        waited = time.monotonic() - began
        if waited >= limit:
            return False
        if began + waited >= looked + LOOK:
            look()
            looked = time.monotonic()
        time.sleep(min(waited / 8, longest_pause, limit - waited))
    return True
