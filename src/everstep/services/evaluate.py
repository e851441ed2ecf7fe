"""Evaluation of one of a Trainer's streams, when it is due."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from everstep.contracts import Boundary, Moment, Outcome, RunView, Service, Stage
from everstep.errors import ConfigError
from everstep.keywords import whole
from everstep.schedule import Every, Schedule

Evaluator = Callable[[str, int], Mapping[str, float]]
"""(stream's name, number of batches or -1) to metrics, their names with the stream's prefix."""


class Evaluate(Service):
    """Evaluates a stream of the `Trainer`; what decides and saves at the same boundary sees the result.

    Metrics get the stream's name as prefix: "valid/loss".

    Args:
        stream: its name among the Trainer's streams.
        every: when; default each epoch.
        num_steps: batches to evaluate, 1 or more; -1: until the stream ends (one without an end needs a
            number).
        validate_first: whether to evaluate before the first step, too: the baseline, recorded at step 0.
        name: default the stream's name.

    Raises:
        ConfigError: `num_steps` is out of its range; in a loop without a Trainer.
    """

    stage = Stage.EVALUATE
    isolate = False
    window = "none"

    def __init__(
        self,
        stream: str = "valid",
        every: Schedule | None = None,
        *,
        num_steps: int = -1,
        validate_first: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name or stream, Every(epochs=1) if every is None else every)
        self.stream, self.num_steps, self.validate_first = stream, steps(num_steps), validate_first
        self.evaluator: Evaluator | None = None
        """What evaluates; the Trainer sets it."""
        if validate_first:
            self.moments |= {Moment.BEFORE_EPOCH}

    def open(self, run: RunView) -> None:
        if self.evaluator is None:
            raise ConfigError(
                f"{self!r} evaluates a stream of a Trainer, and this loop has none; give it to a Trainer's "
                "services=, or evaluate in the loop: with loop.evaluation(): ..."
            )

    def run(self, boundary: Boundary) -> Outcome | None:
        if boundary.moment is Moment.BEFORE_EPOCH and boundary.step:
            return None
        assert self.evaluator is not None
        return Outcome(self.evaluator(self.stream, self.num_steps))


def steps(num_steps: int) -> int:
    """`num_steps`, which is -1 or more than 0."""
    return num_steps if num_steps == -1 else whole("num_steps", num_steps)
