"""Rollback of a failed step: back to a checkpoint, and training without the batch that caused the failure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from everstep.arguments import integer
from everstep.checkpoint import CheckpointName
from everstep.contracts.services import Boundary, Moment, Service, Stage
from everstep.record import Rollback


class Drawn(NamedTuple):
    """Batch that was handed out, and its step."""

    step: int
    stream: str
    pass_index: int
    batch_index: int


class Recovery(Service):
    """Go back to the last good checkpoint where a step fails, and train on without that step's batches.

    Other services and errors report a failed step: `NaNGuard`, `LossBound`, a service's
    `Stop(failed=True)`, a `BadStepError` raised in the loop.  The loop is then left through `RolledBack`,
    exit status 3.  The next start (a `Trainer` and `everstep.recovering` start again by themselves) resumes
    before the failed step, and draws and passes over the quarantined batches: they cost no step.  Rollbacks
    are decisions in the journal: no resume forgets a rollback or its quarantine, not even without this
    service.

    The quarantine has the batches of the failed step.  If that step, or an earlier step, fails again after
    the k-th rollback, the fault may lie further back (a NaN shows one step after the update that made it):
    then the quarantine has the batches of the last k + 1 steps that read data, the failed step included.  So
    the decisions and the step alone determine the batches.

    The failure stands, as without this service, if the tries are used up, or if there is no checkpoint or no
    batch to blame; it stands at every later start, until `max_rollbacks` is raised.  It also stands in a
    `Trainer` over a generator or another iterator, which can be read only once.

    Args:
        max_rollbacks: limit of rollbacks, 1 or more: in all, or in a row (`reset_after`).
        reset_after: after n steps without a failure, 1 or more, the tries count anew; None: never.
    """

    stage = Stage.GUARD
    moments = frozenset({Moment.AFTER_CHECKPOINT})
    controller = True
    isolate = False
    window = "none"

    def __init__(self, max_rollbacks: int = 3, *, reset_after: int | None = None) -> None:
        super().__init__("recovery")
        self.max_rollbacks = integer("max_rollbacks", max_rollbacks)
        self.reset_after = integer("reset_after", reset_after, none="to count all of them")
        self._drawn: deque[Drawn] = deque()

    def drew(self, step: int, stream: str, pass_index: int, batch_index: int) -> None:
        """Note a batch that was handed out for `step`."""
        self._drawn.append(Drawn(step, stream, pass_index, batch_index))

    def used(self, before: Iterable[Rollback], step: int) -> int:
        """Count the tries that the rollbacks so far have used, where `step` fails."""
        count, last, number = 0, None, 0
        for failed, which in [*((each.step, each.number) for each in before), (step, None)]:
            if last is not None and self.reset_after is not None and failed - last >= self.reset_after:
                count = 0
            if which is not None:  # a gap in the numbers: the record has lost a rollback, which counts too
                count, number = count + which - number, which
            last = failed
        return count

    def blamed(self, before: Sequence[Rollback], step: int) -> list[Drawn]:
        """List the batches to quarantine where `step` fails; none if no step up to `step` read data."""
        reach = 1
        for each in reversed(before):
            if each.step < step:
                break
            reach += 1
        return _of_last_steps([drawn for drawn in self._drawn if drawn.step <= step], reach)

    def run(self, boundary: Boundary) -> None:
        """Forget batches too far before a checkpoint: they are never blamed."""
        step = CheckpointName.parse(boundary.payload).step
        old = [drawn for drawn in self._drawn if drawn.step <= step]
        for _ in range(len(old) - len(_of_last_steps(old, self.max_rollbacks))):
            self._drawn.popleft()

    def state_dict(self) -> list[list[Any]]:
        return [list(drawn) for drawn in _of_last_steps(self._drawn, self.max_rollbacks)]

    def load_state_dict(self, state: Any) -> None:
        self._drawn = deque(Drawn(*each) for each in state)


def _of_last_steps(drawn: Iterable[Drawn], count: int) -> list[Drawn]:
    """List the batches of the last `count` steps that read data; `drawn` is in the order of steps."""
    found: list[Drawn] = []
    steps: set[int] = set()
    for each in reversed(list(drawn)):
        steps.add(each.step)
        if len(steps) > count:
            break
        found.append(each)
    return found[::-1]
