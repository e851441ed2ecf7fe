"""A failed step is undone: back to a checkpoint, and on without the batch that spoilt it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from everstep.checkpoint import CheckpointName
from everstep.contracts.services import Boundary, Moment, Service, Stage
from everstep.keywords import whole
from everstep.record import Rollback


class Drawn(NamedTuple):
    """A batch that was handed out, and for which step."""

    step: int
    stream: str
    pass_index: int
    batch_index: int


class Recovery(Service):
    """Goes back to the last good checkpoint where a step fails, and on without that step's batches.

    What fails is said by others: `NaNGuard`, `LossBound`, a service's `Stop(failed=True)`, a
    `BadStepError` raised in the loop.  The loop is then left through `RolledBack`, exit status 3: started
    again (a `Trainer` and `everstep.recovering` do so by themselves) the run resumes before the failed
    step, and the quarantined batches are drawn and passed over: they cost no step.  Rollbacks are decisions
    in the journal: no resume forgets one, nor the quarantine, not even without this service.

    Which batches: those of the failed step.  Fails that step, or one before it, again after the k-th
    rollback for it, so the fault may lie further back (a NaN shows one step after the update that made it):
    then those of the last k + 1 steps that read data, the failed one included.  So the batches follow from
    the decisions and the step alone.

    If the tries are used up, or there is no checkpoint or no batch to blame, the failure stands as if this
    service were not there; so it does at every start after it, until `max_rollbacks` is raised.  So it does
    in a `Trainer` over a generator or another iterator, which can be read only once.

    Args:
        max_rollbacks: how many there may be, 1 or more: in all, or in a row.
        reset_after: after so many steps without a failure, 1 or more, the tries count anew; None: never.
    """

    stage = Stage.GUARD
    moments = frozenset({Moment.AFTER_CHECKPOINT})
    controller = True
    isolate = False
    window = "none"

    def __init__(self, max_rollbacks: int = 3, *, reset_after: int | None = None) -> None:
        super().__init__("recovery")
        self.max_rollbacks = whole("max_rollbacks", max_rollbacks)
        self.reset_after = whole("reset_after", reset_after, none="to count all of them")
        self._drawn: deque[Drawn] = deque()

    def drew(self, step: int, stream: str, pass_index: int, batch_index: int) -> None:
        """Note a batch that was handed out for `step`."""
        self._drawn.append(Drawn(step, stream, pass_index, batch_index))

    def used(self, before: Iterable[Rollback], step: int) -> int:
        """How many tries the rollbacks so far have used, where `step` fails."""
        count, last, number = 0, None, 0
        for failed, which in [*((each.step, each.number) for each in before), (step, None)]:
            if last is not None and self.reset_after is not None and failed - last >= self.reset_after:
                count = 0
            if which is not None:  # a number that is left out is of one that the record has lost
                count, number = count + which - number, which
            last = failed
        return count

    def blamed(self, before: Sequence[Rollback], step: int) -> list[Drawn]:
        """The batches to quarantine where `step` fails; none if it and those before it read no data."""
        reach = 1
        for each in reversed(before):
            if each.step < step:
                break
            reach += 1
        return _of_last_steps([drawn for drawn in self._drawn if drawn.step <= step], reach)

    def run(self, boundary: Boundary) -> None:
        """What lies too far before a checkpoint is never blamed."""
        step = CheckpointName.parse(boundary.payload).step
        old = [drawn for drawn in self._drawn if drawn.step <= step]
        for _ in range(len(old) - len(_of_last_steps(old, self.max_rollbacks))):
            self._drawn.popleft()

    def state_dict(self) -> list[list[Any]]:
        return [list(drawn) for drawn in _of_last_steps(self._drawn, self.max_rollbacks)]

    def load_state_dict(self, state: Any) -> None:
        self._drawn = deque(Drawn(*each) for each in state)


def _of_last_steps(drawn: Iterable[Drawn], count: int) -> list[Drawn]:
    """Those of the last so many steps that read data; `drawn` is in the order of steps."""
    found: list[Drawn] = []
    steps: set[int] = set()
    for each in reversed(list(drawn)):
        steps.add(each.step)
        if len(steps) > count:
            break
        found.append(each)
    return found[::-1]
