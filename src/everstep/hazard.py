"""Named points at which a test may kill the process or make an operation fail.

Every operation of a save, and a few other places where a crash is worst, call `reach(name)`.
Unarmed, that is one comparison.  A process is armed from outside, through the environment:

    EVERSTEP_HAZARD="kill:checkpoint.rename:2"     # SIGKILL itself at the second time it gets there
    EVERSTEP_HAZARD="ENOSPC:journal.write:3-5"     # raise OSError(ENOSPC) the 3rd to 5th time
    EVERSTEP_HAZARD="trace:/tmp/file"              # append each name reached, to learn what there is

or from a test in the same process with `arm(spec)`.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable

from everstep.errors import ConfigError

_action: Callable[[str], None] | None = None


def reach(name: str) -> None:
    """The process has come to point `name`."""
    if _action is not None:
        _action(name)


def arm(spec: str | None) -> None:
    """Arm one hazard, or disarm with None.

    Args:
        spec: "ACTION:POINT:N" or "ACTION:POINT:FROM-TO"; ACTION is "kill" or an errno's name; counts
            start at 1.  Or "trace:FILE".

    Raises:
        ConfigError: the spec is not of that form.
    """
    global _action
    _action = None if spec is None else _parse(spec)


def _parse(spec: str) -> Callable[[str], None]:
    kind, _, rest = spec.partition(":")
    if kind == "trace":
        return lambda name: _append(rest, name)
    point, _, span = rest.rpartition(":")
    first, _, last = span.partition("-")
    number = None if kind == "kill" else getattr(errno, kind, None)
    if not point or not first.isdigit() or (kind != "kill" and number is None):
        raise ConfigError(f"hazard {spec!r}: give 'kill:POINT:N' or 'ERRNO:POINT:N' or 'trace:FILE'")
    hits = range(int(first), int(last or first) + 1)
    count = 0

    def act(name: str) -> None:
        nonlocal count
        if name != point:
            return
        count += 1
        if count in hits:
            if number is None:
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                raise OSError(number, f"{os.strerror(number)} (hazard {spec})")

    return act


def _append(path: str, name: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(name + "\n")


arm(os.environ.get("EVERSTEP_HAZARD"))
