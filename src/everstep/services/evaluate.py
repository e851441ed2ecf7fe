"""Evaluation of a Trainer's stream, on a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everstep.arguments import integer
from everstep.contracts.services import Boundary, BuiltIn, Moment, Outcome, RunView, Stage
from everstep.contracts.state import Json
from everstep.errors import ConfigError
from everstep.metrics.statistics import checked_statistics
from everstep.schedule import Every, Instant, Schedule

Evaluator = Callable[["Evaluate"], Mapping[str, float]]
"""Function from the evaluation service to metrics; their names have the stream's prefix."""


class Evaluate(BuiltIn):
    """Evaluate a stream of the `Trainer`; services that decide and save at the same boundary see the result.

    Metrics get the stream's name as prefix: "valid/loss".

    Args:
        stream: name of the stream among the Trainer's streams.
        every: when to evaluate; default each epoch.
        num_steps: batches to evaluate, 1 or more; -1: until the stream ends (an endless stream needs a
            number).
        validate_first: whether to evaluate before the first step, too: the baseline, recorded at step 0.
        stats: metric -> statistics besides the mean, as in `{"loss": ["std", "q90"]}`, recorded as
            "valid/loss/q90": mean, sum, std, var, min, max, median, a percentile q0 to q100; nanmean and
            so on, which leave NaN out; nancount, nanfraction.  A metric named here may be an array of
            each sample's values, which a quantile over samples needs.
        online_agg_func: (current, new, step) -> current, for each batch's outputs, step from 0 and current
            None at first; default: append to a list.  Replaces, with `agg_func`, the task's `eval_begin`,
            `eval_reduce` and `eval_end`.
        agg_func: last result of `online_agg_func` -> metrics; default: that result itself.
        evaluator: function from this service to metrics, in any loop, as in `lambda service:
            {"valid/loss": evaluate(model)}`; `evaluate_all` leaves it out.  Default: the Trainer's.
        name: name of the service; default the stream's name.
    """

    stage = Stage.EVALUATE
    default_schedule = Every(epochs=1)

    def __init__(
        self,
        stream: str = "valid",
        every: Schedule | None = None,
        *,
        num_steps: int = -1,
        validate_first: bool = False,
        stats: Mapping[str, str | Sequence[str]] | None = None,
        online_agg_func: Callable[[Any, Mapping[str, Any], int], Any] | None = None,
        agg_func: Callable[[Any], Mapping[str, Any]] | None = None,
        evaluator: Evaluator | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name or stream, every)
        self.stream, self.num_steps, self.validate_first = stream, steps(num_steps), validate_first
        self.stats = checked_statistics(stats or {})
        self.online_agg_func, self.agg_func = online_agg_func, agg_func
        self.evaluator = evaluator
        self.ends: Callable[[], bool] | None = None
        """Whether the run ends at this epoch's end; None unless the end is evaluated in any case."""
        self.is_default = False
        """Whether the Trainer added this service by itself; then an evaluation by the program replaces it."""
        self.left_out_at = -1
        """Step at which the program evaluated by itself; -1 for none."""
        if validate_first:
            self.moments |= {Moment.BEFORE_EPOCH}

    def config(self) -> Json:
        return {"stream": self.stream, "num_steps": self.num_steps}

    def open(self, run: RunView) -> None:
        if self.evaluator is None:
            raise ConfigError(
                f"{self!r} evaluates a stream of a Trainer, and this loop has no Trainer; give the service "
                "to a Trainer's services=, or an evaluator="
            )

    def due(self, when: Instant) -> bool:
        if when.step == self.left_out_at:
            return False
        if super().due(when):
            return True
        # where the run ends, and its last step was not evaluated
        is_end = when.at_epoch_end and self.ends is not None and self.ends()
        return is_end and not super().due(when._replace(at_epoch_end=False))

    def run(self, boundary: Boundary) -> Outcome | None:
        # a baseline comes before step 1 only, also where a resume enters an epoch again
        if boundary.moment is Moment.BEFORE_EPOCH and boundary.step:
            return None
        assert self.evaluator is not None
        return Outcome(self.evaluator(self))


def steps(num_steps: int) -> int:
    """Check `num_steps`, which is -1 or more than 0."""
    return -1 if num_steps == -1 else integer("num_steps", num_steps)
