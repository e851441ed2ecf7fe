"""The ending of a start: status, reason, and where everything lies."""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.contracts.services import Interrupt
from everstep.errors import Interrupted
from everstep.supervisor.saving.state_tree import StopRecord


@dataclass(frozen=True)
class BestRecord:
    """The best value of a metric so far.

    Attributes:
        metric, value: the metric's name and its best value.
        step, epoch: step and epoch in which the value was collected.
        path: the folder with the weights of that value; None where they were not kept.
    """

    metric: str
    value: float
    step: int
    epoch: int
    path: str | None


@dataclass(frozen=True)
class Ending:
    """Result of a `with` block.

    Attributes:
        reason: why the start ended, in words.
        step, epoch: last completed step and epoch.
        finished: True if the run is complete: starting it again runs no step.
        best: the best record of the watched metric, None if there is none.
        where: paths by name: "run", "checkpoints", "journal", "log", "best".
        digest: digest of every leaf of the last committed state outside `wall/`; equal digests are equal
            runs.  None if nothing was committed.
        resumed_from: name of the checkpoint that this start continued from, None for a fresh start.
        segment: the number of this start, from 1.
        failed_saves: number of saves that failed in this start.
        warnings: the warnings of this start, in order.
        rollbacks: number of rollbacks in all starts of the run (`Recovery`).
        one_fingerprint: whether every step of the run was computed on the same kind of machine, by the same
            libraries, number and layout of ranks, and under the same settings: else weights and `digest` need
            not be those of a run that was never stopped.  Numbers of ranks count as the same where steps have
            the same bits on each (`everstep.torch.VirtualShards`, and no `PerRank` entry): the weights are
            then those of a run that was never stopped; the digest covers each rank's random state, too.
        diverged: the first step of the run that had other results when a resume executed it again, and that
            nobody has accepted (`everstep accept`); None if there is none.
    """

    reason: str
    step: int
    epoch: int
    finished: bool
    best: BestRecord | None
    where: dict[str, str]
    digest: str | None
    resumed_from: str | None
    segment: int
    failed_saves: int = 0
    warnings: tuple[str, ...] = field(default=())
    rollbacks: int = 0
    one_fingerprint: bool = True
    diverged: int | None = None

    def __str__(self) -> str:
        state = "finished" if self.finished else "resumable"
        diverged = "" if self.diverged is None else f", diverged at step {self.diverged}"
        return f"{self.reason} (step {self.step}, {state}{diverged})"


def end_status(
    cause: BaseException | None, stop: StopRecord | None, interruption: Interrupt | None, *, at_end: bool
) -> tuple[str, str]:
    """Find how a start has ended, "finished" (the run is complete), "stopped" or "failed", and why."""
    if isinstance(cause, Interrupted):
        return ("stopped", cause.reason)
    # an interactive session is left by KeyboardInterrupt, saved like a script that a signal ends
    if isinstance(cause, KeyboardInterrupt) and interruption is not None:
        return ("stopped", interruption.reason)
    if cause is not None:
        return ("failed", f"{type(cause).__name__}: {cause}")
    if stop is None:
        return ("stopped", "the loop was left before its end")
    if stop.failed:
        return ("failed", stop.reason)
    return ("finished" if at_end else "stopped", stop.reason)
