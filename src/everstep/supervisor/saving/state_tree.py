"""The state tree of a run: its counters, its branches as written, and the checks of a reader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from everstep.checkpoint import Checkpoint, Phase
from everstep.contracts.group import DataRanks
from everstep.errors import EverstepError, RestoreError, StateError
from everstep.state import Encoded, decode


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
        kind: "max_step", "max_epoch", "stream" (a stream's passes are used up), "service" or "request".
        by: name of the service that decided, or of the stream that ended; None for the others.
        limits: the limits when it was decided; raising one reopens the run, unless a service decided.
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
        step, updates: completed steps, and optimizer updates that really happened.
        phase: kind of boundary at which this was saved, or is being saved.
        epoch: current or last epoch, from 1; 0 before the first.
        epoch_start, call_start: `step` when the epoch, and the open `iter_steps` loop, began.
        epoch_loop: number of the `iter_epochs` loop that the program is in, from 1; 0 before the first.
        calls: number of `iter_steps` loops finished in this epoch.
        iterating: whether an `iter_steps` loop is open.
        stream: the stream that the open loop reads, None without data.
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
        fields = {name: value for name, value in tree.items() if name != "batch_in_epoch"}
        stop = fields.pop("stop")
        progress = cls(**fields, stop=None if stop is None else StopRecord(**stop))
        for name, value in asdict(cls(seed=0)).items():
            if value is not None and type(getattr(progress, name)) is not type(value):
                raise TypeError(f"{name} is {getattr(progress, name)!r}")
        return progress


BRANCHES = ("progress", "user", "gradients", "streams", "rng", "services", "wall")
"""The branches of a run's state.  Best weights have `user` alone."""


def random_parts(rank: int) -> tuple[str, str]:
    """Return the names of a rank's random state in `rng`: as it is now, and for lines that run again."""
    return f"rank{rank}", f"lines{rank}"


def saved_tree(checkpoint: Checkpoint, branches: tuple[str, ...] = BRANCHES) -> dict[str, Any]:
    """Decode branches of a checkpoint's tree."""
    structure: Any = checkpoint.structure if isinstance(checkpoint.structure, dict) else {}
    if missing := [name for name in branches if name not in structure]:
        raise RestoreError(
            f"checkpoint {checkpoint.path} holds only {', '.join(structure) or 'nothing'}: best weights, or "
            "the state of another program; resume from one in checkpoints/, or take the weights alone with "
            f"init_from={str(checkpoint.path)!r} in a new run directory",
            missing=missing,
        )
    tree = {}
    for name in branches:
        with reading(checkpoint.path, name):
            tree[name] = dict(decode(Encoded(structure[name], checkpoint.arrays)))
    return tree


@contextmanager
def reading(where: object, part: str) -> Iterator[None]:
    """Raise RestoreError, with the part of a checkpoint, in place of an error that is not everstep's own."""
    try:
        yield
    except Exception as error:
        if isinstance(error, EverstepError) and not isinstance(error, StateError):
            raise
        notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
        what = error if isinstance(error, StateError) else f"{type(error).__name__}: {error}"
        raise RestoreError(
            f"{where}: its part {part!r} cannot be used ({what}{notes}); its checksum is right, so another "
            "program or version has written it: resume from another checkpoint, or start in a new directory"
        ) from error


def saved_meta(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a run's `meta` in a checkpoint, with the facts that every reader needs."""
    meta: Any = checkpoint.meta
    with reading(checkpoint.path, "meta"):
        return {**meta, **{name: meta[name] for name in ("controllers", "options", "metrics")}}


def saved_data(checkpoint: Checkpoint) -> DataRanks:
    """Return which part of each batch the ranks read that wrote a checkpoint."""
    meta = checkpoint.meta if isinstance(checkpoint.meta, dict) else {}
    stored = meta.get("data_ranks")
    with reading(checkpoint.path, "meta/data_ranks"):
        data = DataRanks(range(checkpoint.ranks) if stored is None else stored)
        if len(data.of) != checkpoint.ranks:
            raise ValueError(f"it is {stored!r:.100}")
    return data
