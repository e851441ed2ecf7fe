"""Hazards: named places at which a test can kill the process or make an operation fail.

Every operation of a save calls `reach(name)`, and so do a few other places where a crash does most harm
("loop.PLACE").  If no hazard is armed, a call costs one comparison.  A process is armed through its
environment:

    EVERSTEP_HAZARD="kill:checkpoint.rename:2"     # SIGKILL itself at the second time it gets there
    EVERSTEP_HAZARD="ENOSPC:journal.write:3-5"     # raise OSError(ENOSPC) the 3rd to 5th time
    EVERSTEP_HAZARD="SIGTERM:drill.step:7 then kill:checkpoint.fsync:1"    # send itself a signal, then ...
    EVERSTEP_HAZARD="trace:/tmp/file"              # append each name reached, to learn what there is
    EVERSTEP_HAZARD="kill:checkpoint.rename:2 @ rank 1"   # of several ranks (RANK) arm this one
    EVERSTEP_HAZARD="trace:/tmp/file-{rank}"       # each rank has a file of its own

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
    """Report that the process has come to a hazard, and act if it is armed."""
    if _action is not None:
        _action(name)


def arm(spec: str | None) -> None:
    """Arm a hazard, or disarm with None.

    Args:
        spec: "ACTION:POINT:N" or "ACTION:POINT:FROM-TO"; ACTION is "kill", or the name of a signal or
            errno; counts start at 1.  "... then ..." arms the second part when the first part has struck for
            the last time.  "trace:FILE" only appends names.
    """
    global _action
    _action = None if spec is None else _parse(spec)


def _parse(spec: str) -> Callable[[str], None]:
    if spec.startswith("trace:"):
        return lambda name: _append(spec.removeprefix("trace:"), name)
    first, _, afterwards = spec.partition(" then ")
    kind, _, rest = first.partition(":")
    point, _, span = rest.rpartition(":")
    start, _, end = span.partition("-")
    strike = _strike(kind, spec)
    if not point or not start.isdigit() or strike is None:
        raise ConfigError(
            f"hazard {first!r}: give 'kill:POINT:N', 'SIGNAL:POINT:N', 'ERRNO:POINT:N' or 'trace:FILE'"
        )
    hits = range(int(start), int(end or start) + 1)
    count = 0

    def act(name: str) -> None:
        nonlocal count
        if name != point:
            return
        count += 1
        # The next part is armed first: a strike that kills or raises does not come back here.
        if count == hits[-1] and afterwards:
            arm(afterwards)
        if count in hits:
            strike()

    return act


def _strike(kind: str, spec: str) -> Callable[[], None] | None:
    if kind == "kill":
        return lambda: os.kill(os.getpid(), signal.SIGKILL)
    if kind in signal.Signals.__members__:
        return lambda: os.kill(os.getpid(), signal.Signals[kind])
    number = getattr(errno, kind, None)
    return None if number is None else lambda: _fail(number, spec)


def _fail(number: int, spec: str) -> None:
    raise OSError(number, f"{os.strerror(number)} (hazard {spec})")


def _append(path: str, name: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(name + "\n")


def _for_this_rank(spec: str | None, rank: str) -> str | None:
    """Return what the environment aims at this rank; None for nothing."""
    if spec is None:
        return None
    spec, at, aimed = spec.partition(" @ rank ")
    return None if at and aimed != rank else spec.replace("{rank}", rank)


arm(_for_this_rank(os.environ.get("EVERSTEP_HAZARD"), os.environ.get("RANK", "0")))
