"""Watch over a run that may hang."""

from __future__ import annotations

from typing import Literal

from everstep.arguments import number
from everstep.contracts.services import Boundary, Service, Stage
from everstep.errors import ConfigError

HALF_AN_HOUR = 1800.0


class HangWatch(Service):
    """Notice when nothing moves: no step, batch, evaluation or save has ended for a long time.

    The stacks of all threads then go into a page in `failures/`, an event "hang" into the journal, and a
    warning to the screen: once for each hang.  On several ranks all of them write their stacks.

    A thread looks once a second at the counters that the loop has anyway, so steps cost nothing more.
    It counts its own looks, not the time: a process that is stopped (SIGSTOP), a machine that sleeps and a
    clock that is set do not hang.  C code that keeps Python's lock also stops this thread; `py-spy dump
    --pid PID` shows where.

    Every run with `default_services` has one.

    Args:
        after: seconds without a move.  Longer than the longest step (the first one may compile), the longest
            part of your own code between steps (an evaluation, say) and the longest save.
        then: "warn", or "stop": the process also ends, with exit status 1 and nothing saved, and is to be
            started again from the newest checkpoint.

    Raises:
        ConfigError: `after` is not a positive number, or `then` is something else.
    """

    stage = Stage.GUARD
    moments = frozenset()
    isolate = False
    window = "none"

    def __init__(self, after: float = HALF_AN_HOUR, then: Literal["warn", "stop"] = "warn") -> None:
        super().__init__("hang watch")
        self.after = number("after", after, of="seconds")
        if then not in ("warn", "stop"):
            raise ConfigError(f'then={then!r}: give "warn" or "stop"')
        self.then = then

    def run(self, boundary: Boundary) -> None:
        """Do nothing at a boundary."""
