"""Timing of a start: where its seconds go."""

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
        """Clock time at which the current boundary began; None between boundaries."""

    def begin(self) -> None:
        """Begin to count: the loop is entered."""
        self._began = self._clock()

    @property
    def seconds(self) -> float:
        """Seconds since the loop was entered."""
        return self._clock() - self._began

    @property
    def at_boundary(self) -> bool:
        """Whether the loop is at a boundary, whose time counts as that of services."""
        return self._boundary is not None

    def begin_boundary(self) -> None:
        """Count the time from here on as that of services."""
        self._boundary = self._clock()

    def end_boundary(self) -> None:
        """End the time of services."""
        assert self._boundary is not None
        self._services += self._clock() - self._boundary
        self._boundary = None

    def in_steps(self, seconds: float) -> None:
        """Count seconds of this boundary as time of steps."""
        self._services -= seconds

    def in_evaluation(self, seconds: float) -> None:
        """Count seconds as evaluation, by a service or by the program."""
        self._evaluation += seconds
        if self.at_boundary:
            self._services -= seconds

    def parts(self, data: float) -> dict[str, float]:
        """Return the seconds by part; `data` are the seconds spent waiting for batches."""
        now = self._clock()
        open_boundary = 0.0 if self._boundary is None else now - self._boundary
        parts = {"data": data, "evaluation": self._evaluation, "services": self._services + open_boundary}
        return {**parts, "step": now - self._began - sum(parts.values())}
