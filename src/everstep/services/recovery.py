"""What a run does when something goes wrong: rolls back, tries again, or notices that it hangs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from everstep.arguments import integer, number
from everstep.checkpoint import CheckpointName
from everstep.contracts.services import Boundary, BuiltIn, Moment, Stage
from everstep.errors import ConfigError, DivergenceError
from everstep.record import Rollback

HALF_AN_HOUR = 1800.0
NINE_MINUTES = 540.0
"""Less than the limit of a rank that waits for the others: the watch says first where each of them stands."""


class Drawn(NamedTuple):
    """Batch that was handed out, and its step."""

    step: int
    stream: str
    pass_index: int
    batch_index: int


class Recovery(BuiltIn):
    """Go back to the last good checkpoint where a step fails, and train on without that step's batches.

    A failed step is reported by `NaNGuard`, `LossBound`, a service's `Stop(failed=True)`, or a `BadStepError`
    raised in the loop.  The loop is then left through `RolledBack`, exit status 3.  The next start (a
    `Trainer` and `everstep.recovering` start again by themselves) resumes before the failed step, and passes
    over the quarantined batches: those of the failed step, and if that step or an earlier one fails again
    after the k-th rollback, those of the last k + 1 steps that read data.

    Args:
        max_rollbacks: limit of rollbacks, 1 or more: in all, or in a row (`reset_after`).
        reset_after: after n steps without a failure, 1 or more, the tries count anew; None: never.
    """

    stage = Stage.GUARD
    moments = frozenset({Moment.AFTER_CHECKPOINT})
    controller = True

    def __init__(self, max_rollbacks: int = 3, *, reset_after: int | None = None) -> None:
        super().__init__("recovery")
        self.max_rollbacks = integer("max_rollbacks", max_rollbacks)
        self.reset_after = integer("reset_after", reset_after, none="to count all of them")
        self._batches: list[Drawn] = []

    def drew(self, step: int, stream: str, pass_index: int, batch_index: int) -> None:
        self._batches.append(Drawn(step, stream, pass_index, batch_index))

    def used(self, rollbacks: Iterable[Rollback], step: int) -> int:
        """Count the tries that the rollbacks so far have used, where `step` fails."""
        count, last, number = 0, None, 0
        for failed_step, index in [*((each.step, each.number) for each in rollbacks), (step, None)]:
            if last is not None and self.reset_after is not None and failed_step - last >= self.reset_after:
                count = 0
            if index is not None:  # a gap in the numbers: the record has lost a rollback, which counts too
                count, number = count + index - number, index
            last = failed_step
        return count

    def blamed(self, rollbacks: Sequence[Rollback], step: int) -> list[Drawn]:
        """List the batches to quarantine where `step` fails; none if no step up to `step` read data."""
        reach = 1
        for each in reversed(rollbacks):
            if each.step < step:
                break
            reach += 1
        return _of_last_steps([batch for batch in self._batches if batch.step <= step], reach)

    def run(self, boundary: Boundary) -> None:
        """Forget batches too far before a checkpoint: they are never blamed."""
        step = CheckpointName.parse(boundary.payload).step
        old = [batch for batch in self._batches if batch.step <= step]
        self._batches = _of_last_steps(old, self.max_rollbacks) + self._batches[len(old) :]

    def state_dict(self) -> list[list[Any]]:
        return [list(batch) for batch in _of_last_steps(self._batches, self.max_rollbacks)]

    def load_state_dict(self, state: Any) -> None:
        self._batches = [Drawn(*each) for each in state]


def _of_last_steps(batches: Sequence[Drawn], count: int) -> list[Drawn]:
    steps = sorted({each.step for each in batches})[-count:]
    return [each for each in batches if each.step in steps]


class Retry(BuiltIn):
    """Try again, in the same process, after a listed error: reading data, a step, a save.

        Retry(errors=[ConnectionError, TimeoutError], times=5, backoff=2.0)

    After an error in a step, its data or an evaluation, the loop is left through `TriedAgain`, exit status 3,
    and the run resumes from its newest checkpoint; a `Trainer` and `everstep.recovering` do so by themselves.
    A save is tried again where it failed.  A try counts until the run has passed the furthest step that
    failed.  After the last try the error stands; a `DivergenceError` always does: it would come again.

    Args:
        errors: classes of errors that go away by themselves.
        times: limit of tries in a row, 1 or more.
        backoff: seconds before the first try, 0 or more; doubled before each further try.
    """

    stage = Stage.GUARD
    moments = frozenset()

    def __init__(
        self,
        errors: type[Exception] | Sequence[type[Exception]] = (ConnectionError, TimeoutError),
        *,
        times: int = 3,
        backoff: float = 1.0,
    ) -> None:
        super().__init__("retry")
        self.errors = (errors,) if isinstance(errors, type) else tuple(errors)
        if not all(isinstance(each, type) and issubclass(each, Exception) for each in self.errors):
            raise ConfigError(f"Retry(errors={errors!r}): give classes of exceptions")
        self.times = integer("times", times)
        self.backoff = number("backoff", backoff, of="seconds", zero=True)

    def takes(self, error: BaseException) -> bool:
        return isinstance(error, self.errors) and not isinstance(error, DivergenceError)

    def seconds(self, attempt: int) -> float:
        """Compute the wait before a try, in seconds; tries count from 1."""
        return float(self.backoff * 2 ** (attempt - 1))


class HangWatch(BuiltIn):
    """Notice when nothing moves: no step, batch, evaluation or save has ended for a long time.

    The stacks of all threads (on every rank) then go into a page in `failures/`, an event "hang" into the
    journal, and a warning to the screen: once for each hang.  Every run with `default_services` has one.

    Args:
        after: seconds without a move; None: half an hour, on several ranks 9 minutes.  Longer than the
            longest step, the longest part of your own code between steps and the longest save.
        then: "warn", or "stop": the process also ends, with exit status 1 and nothing saved.
    """

    stage = Stage.GUARD
    moments = frozenset()

    def __init__(self, after: float | None = None, then: Literal["warn", "stop"] = "warn") -> None:
        super().__init__("hang watch")
        self.after = number("after", after, of="seconds", none="for the default")
        if then not in ("warn", "stop"):
            raise ConfigError(f'then={then!r}: give "warn" or "stop"')
        self.then = then
