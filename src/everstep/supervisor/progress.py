"""Progress of a run: the `progress/` branch of the state tree."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from everstep.checkpoint import Phase


@dataclass
class Limits:
    """Limits of a run; None: no limit."""

    max_step: int | None = None
    max_epoch: int | None = None

    def tree(self) -> dict[str, int | None]:
        """Return the limits as they are saved with a stop."""
        return asdict(self)


@dataclass
class StopRecord:
    """Stop of a run: saved, so that a restart ends the same way.

    Attributes:
        reason: in words, as shown to the user.
        kind: "max_step", "max_epoch", "stream" (a stream's passes are used up), "service" or "request".
        by: name of the service that decided, or of the stream that ended; None for the others.
        limits: max_step and max_epoch when it was decided; raising one of them reopens the run,
            unless a service decided.
        failed: whether the process must exit with status 1.
        code: the exit status otherwise.
    """

    reason: str
    kind: str
    by: str | None
    limits: dict[str, int | None]
    failed: bool = False
    code: int = 0


@dataclass
class Progress:
    """The counters of a run: `seed`, `step`, `updates` and `stop` are the engine's, the rest the loop's.

    Attributes:
        step: completed steps, from 0.
        phase: kind of boundary ("step" or "epoch") at which this was saved, or is being saved.
        epoch: current or last epoch, from 1; 0 before the first.
        epoch_start: `step` when the epoch began.
        epoch_loop: number of the `iter_epochs` loop that the program is in, from 1; 0 before the first.
        calls: number of `iter_steps` loops finished in this epoch.
        iterating: whether an `iter_steps` loop is open.
        stream: the stream that the open loop reads, None without data.
        call_start: `step` when the open loop began.
        updates: optimizer updates that really happened.
        seed: the run's seed.
        stop: why the run is ending, None while it is not.
    """

    seed: int
    step: int = 0
    phase: Phase = "epoch"
    epoch: int = 0
    epoch_start: int = 0
    epoch_loop: int = 0
    calls: int = 0
    iterating: bool = False
    stream: str | None = None
    call_start: int = 0
    updates: int = 0
    stop: StopRecord | None = None

    def tree(self, phase: Phase) -> dict[str, Any]:
        """Return the branch as saved at a boundary of kind `phase`."""
        return {**asdict(self), "phase": phase, "batch_in_epoch": self.step - self.epoch_start}

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Progress:
        """Make a Progress of what `tree` returned.

        Raises:
            TypeError: a counter is missing, unknown, or of another type.
        """
        fields = {name: value for name, value in tree.items() if name != "batch_in_epoch"}
        stop = fields.pop("stop")
        made = cls(**fields, stop=None if stop is None else StopRecord(**stop))
        for name, value in asdict(cls(seed=0)).items():
            if value is not None and type(getattr(made, name)) is not type(value):
                raise TypeError(f"{name} is {getattr(made, name)!r}")
        return made
