"""The place at which a start begins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from everstep.record import EarlierSteps, Position, StepComparison
from everstep.supervisor.opening.machine import Fingerprint
from everstep.supervisor.saving.state_tree import Progress


@dataclass
class Recovered:
    """Place at which this start begins, and what was restored there.

    Attributes:
        progress: the counters, which continue; those of a fresh run if `checkpoint` is None.
        step, epoch: step and epoch at which the start begins.
        mid_epoch: whether the start begins inside an epoch, which is then entered again.
        checkpoint: name of the checkpoint that is continued, None for a fresh start.
        random: random state to put back at the resume point, None for a fresh start.
        lines: random state for the program's lines that run again before that point.
        parent: the journal's end as the checkpoint knows it.
        comparison: compares steps that run again with their earlier executions.
        chosen: a person's choice that rules out a comparison with earlier executions; else "".
        collector: saved metric windows, None for a fresh start.
        finished: whether the run was complete and nothing reopened it.
        digest: digest of the checkpoint's state.
        ranks_before: number of ranks that wrote the checkpoint, if this start has another; else None.
        last_values: the newest value of each metric collected outside steps.
        last_steps: step of each value in `last_values`.
        services, streams, wall: those branches of the saved tree.
        open: names of the services that the checkpoint's boundary has still to run; empty unless an
            interruption left an evaluation there.
        kept: facts that the record keeps as stored, because no step runs with what was given.
        fingerprint: the fingerprint of this start.
        same_numbers: whether the steps that run again were computed under this fingerprint before; else
            they may give other numbers now.
        one_fingerprint: whether all steps of the run, so far and from here on, have this fingerprint, this
            layout, and this number of ranks, or one on which they have the same bits.
    """

    progress: Progress
    checkpoint: str | None = None
    random: Any = None
    lines: dict[str, Any] = field(default_factory=dict)
    parent: Position | None = None
    comparison: StepComparison = field(default_factory=lambda: StepComparison(EarlierSteps(0)))
    collector: Any = None
    services: dict[str, Any] = field(default_factory=dict)
    streams: dict[str, Any] = field(default_factory=dict)
    finished: bool = False
    digest: str | None = None
    ranks_before: int | None = None
    wall: dict[str, Any] = field(default_factory=dict)
    last_values: dict[str, float] = field(default_factory=dict)
    last_steps: dict[str, int] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)
    fingerprint: Fingerprint = field(default_factory=dict)
    same_numbers: bool = True
    chosen: str = ""
    one_fingerprint: bool = True

    def __post_init__(self) -> None:
        self.step, self.epoch = self.progress.step, self.progress.epoch
        self.mid_epoch = self.checkpoint is not None and self.progress.phase == "step" and self.epoch > 0
