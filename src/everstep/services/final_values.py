"""Values computed at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from everstep.contracts.services import Boundary, Outcome, Service, Stage
from everstep.metrics.collector import to_scalar


class FinalValues(Service):
    """Call a function at the clean end, keep its result in `values`, and record it as metrics.

    A function that fails causes a warning; the training and its last checkpoint are complete by then.

    Args:
        compute: returns names and real numbers; must not change the state.

    Attributes:
        values: result of `compute`; empty before the end.
    """

    stage = Stage.REPORT
    window = "none"

    def __init__(self, compute: Callable[[], Mapping[str, float]], *, name: str | None = None) -> None:
        super().__init__(name or "final values")
        self.compute = compute
        self.values: dict[str, float] = {}

    def run(self, boundary: Boundary) -> None:
        """Do nothing before the end."""

    def finish(self, boundary: Boundary) -> Outcome:
        self.values = {name: float(to_scalar(name, value)) for name, value in self.compute().items()}
        return Outcome(self.values)
