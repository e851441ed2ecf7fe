"""Where the time of a start goes."""

from __future__ import annotations

from everstep.contracts.services import Clock


class Spent:
    """Seconds since the loop was entered, by what they were spent on.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = 0.0
        self._evaluation = self._services = 0.0
        self._boundary: float | None = None
        """When the boundary began at which the loop is; None between boundaries."""

    def begin(self) -> None:
        """The loop is entered."""
        self._began = self._clock()

    @property
    def seconds(self) -> float:
        """All of them."""
        return self._clock() - self._began

    @property
    def at_boundary(self) -> bool:
        """Whether the loop is at a boundary, whose time is that of services."""
        return self._boundary is not None

    def begin_boundary(self) -> None:
        """What follows is the time of services."""
        self._boundary = self._clock()

    def end_boundary(self) -> None:
        """What follows is not."""
        assert self._boundary is not None
        self._services += self._clock() - self._boundary
        self._boundary = None

    def in_steps(self, seconds: float) -> None:
        """So many seconds of this boundary were spent on steps."""
        self._services -= seconds

    def in_evaluation(self, seconds: float) -> None:
        """So many seconds were spent on an evaluation, by a service or by the program."""
        self._evaluation += seconds
        if self.at_boundary:
            self._services -= seconds

    def parts(self, data: float) -> dict[str, float]:
        """Seconds by part; `data`: those in which batches were waited for."""
        now = self._clock()
        open_boundary = 0.0 if self._boundary is None else now - self._boundary
        parts = {"data": data, "evaluation": self._evaluation, "services": self._services + open_boundary}
        return {**parts, "step": now - self._began - sum(parts.values())}
