"""A difference between two executions of the same steps: of a resume, a drill, a replay, or two runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

COMPONENTS = (
    "samples",
    "random state",
    "loss",
    "weights",
    "optimizer",
    "state",
    "service",
    "journal",
)
"""Components of a step, in the order of cause and effect."""

_WHERE = {
    "enter": "before the first step",
    "before": "as step {step} begins",
    "step": "step {step}",
    "tail": "in the tail of epoch {epoch} (step {step})",
    "epoch": "at the end of epoch {epoch} (step {step})",
    "end": "at the end of the run",
}
"""Places within a step, in their order -> words for them."""

ABSENT = "absent"


class Difference(NamedTuple):
    """Value that two executions do not have in common.

    Attributes:
        component: member of `COMPONENTS`.
        name: name of the stream, source of random numbers, metric, state entry, service, or path of a leaf.
        expected, actual: values or digests, in a few words; `ABSENT` where there is none.
        step, epoch: counters at the place; 0 at "end".
        place: "enter", "before", "step", "tail", "epoch" or "end".
        run: the run directory, where there may be several.
        rank: the rank; 0 is the writer, and the only one on one process.
        note: a cause that was seen; "" if there is none.
        path: what differs at the ends of two runs, see `everstep.proof.compare`.
    """

    component: str
    name: str
    expected: str
    actual: str
    step: int = 0
    epoch: int = 0
    place: str = "step"
    run: str = ""
    rank: int = 0
    note: str = ""
    path: str = ""

    @property
    def where(self) -> str:
        """The place in words."""
        return _WHERE[self.place].format(step=self.step, epoch=self.epoch)

    @property
    def order(self) -> tuple[int, ...]:
        """Sort key: by place, then from cause to effect, then by rank."""
        step = {"enter": -1, "end": 1 << 62}.get(self.place, self.step)
        place = list(_WHERE).index(self.place)
        return step, place, COMPONENTS.index(self.component), self.rank

    def __str__(self) -> str:
        on = f" on rank {self.rank}" if self.rank else ""
        return f"{self.component} ({self.name}) {self.where}{on}"


def first_difference(differences: Iterable[Difference], runs: Sequence[str] = ()) -> Difference | None:
    """Return the first of some differences; None if there is none.

    Args:
        runs: the runs, in the order in which the program opens them.
    """

    def order(one: Difference) -> tuple[int, ...]:
        return runs.index(one.run) if one.run in runs else len(runs), *one.order

    return min(differences, key=order, default=None)
