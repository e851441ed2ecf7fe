"""Loading of a run's saved objects in another script, without opening the run."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from everstep.arguments import checked_keywords
from everstep.checkpoint import Checkpoint, Store, read_manifest
from everstep.errors import DamagedCheckpointError, RestoreError, nearest
from everstep.record import RunJournal, to_read, user_path
from everstep.state import Encoded, children, split, within
from everstep.supervisor.leaving.ending import BestRecord
from everstep.supervisor.opening.init_from import InitFrom, in_user
from everstep.supervisor.opening.wrapper_names import base_hint, hint
from everstep.supervisor.saving.state_tree import reading, saved_tree
from everstep.supervisor.saving.user_state import UserState


@dataclass(frozen=True)
class Loaded:
    """Source of loaded objects.

    Attributes:
        path: the checkpoint's folder, or the path of another program's weights.
        step, epoch: step and epoch of the run at the save; 0 for another program's weights.
        digest: digest of the checkpoint.
        seed: seed of the run; None where only weights are kept (best weights).
    """

    path: str
    step: int
    epoch: int
    digest: str = field(default="", compare=False)
    seed: int | None = field(default=None, compare=False)

    @property
    def is_checkpoint(self) -> bool:
        """Whether the source is one of the run's checkpoints; else best weights, or another copy."""
        return Path(self.path).parent.name == "checkpoints"

    @property
    def name(self) -> str:
        """Name of the checkpoint, or the end of the path of other weights."""
        parts = Path(self.path).parts
        return parts[-1] if self.is_checkpoint else "/".join(parts[-3:])


@checked_keywords
def load(source: str | Path | InitFrom, state: Mapping[str, Any] | Sequence[tuple[str, Any]]) -> Loaded:
    """Load objects from what a run has saved, as for inference; no run is opened, nothing is written.

        everstep.load("runs/digits/best/valid_loss", {"model": model})

    Entries that only the checkpoint has, such as the optimizer, are left out.

    Args:
        source: a run directory (its newest whole checkpoint), the folder of a checkpoint,
            `RUN/best/METRIC` (the best weights), another program's weights (safetensors, torch.save,
            torch.distributed.checkpoint), or an `InitFrom` that chooses and renames.
        state: name to object, under the names of the run's `state`.

    Raises:
        RestoreError: the checkpoint lacks an entry, or an entry does not fit; has the three lists, and
            nothing is loaded.
        NoCheckpointError: there is no checkpoint.
        CheckpointError: the checkpoint is damaged.
    """
    chosen = source if isinstance(source, InitFrom) else InitFrom(user_path(source, "source"))
    notes: list[str] = []
    user = UserState(state)
    foreign = chosen.open_foreign(notes.append)
    if foreign is not None:
        user.load_user(chosen.merge_foreign(user, foreign, notes.append, strangers=False))
        _warn(notes)
        return Loaded(str(foreign.path), 0, 0)
    checkpoint = chosen.read(
        notes.append, in_user if chosen is source else within(("user", name) for name in user.entries)
    )
    where = str(checkpoint.path)
    if isinstance(source, InitFrom):
        saved = saved_tree(checkpoint, ("user",))["user"]
        trees = source.merge(user, saved, where, notes.append, strangers=False)
    else:
        saved = saved_tree(_only(checkpoint, user.entries), ("user",))["user"]
        trees = {name: saved[name] for name in user.entries if name in saved}
    with reading(where, "user"):
        _check(user, trees, checkpoint)
        user.load_user(trees)
    _warn(notes)
    return Loaded(where, checkpoint.step, checkpoint.epoch, checkpoint.digest, _seed_in(checkpoint))


def _warn(notes: list[str]) -> None:
    for note in notes:
        warnings.warn(note, RuntimeWarning, stacklevel=4)


def _seed_in(checkpoint: Checkpoint) -> int | None:
    structure: Any = checkpoint.structure
    if "progress" not in structure:
        return None
    return int(saved_tree(checkpoint, ("progress",))["progress"]["seed"])


def _only(checkpoint: Checkpoint, names: Collection[str]) -> Checkpoint:
    """Reduce a checkpoint to some entries: the arrays of others were not read."""
    _, taken = split(Encoded(checkpoint.structure), [("user", name) for name in names])
    return replace(checkpoint, structure=taken.structure or {"user": {}})


def _check(user: UserState, trees: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    structure: Any = checkpoint.structure
    known = children(structure["user"]) or {}
    try:
        user.check(trees, str(checkpoint.path))
    except RestoreError as error:
        unknown = [f"{name!r}: {nearest(name, known)}; " for name in user.entries if name not in trees]
        raise RestoreError(
            f"{checkpoint.path} does not fit these objects; {''.join(unknown)}make them as in the run, "
            "under the same names, or take parts with everstep.load(InitFrom(path, include=..., rename=...), "
            f"state){hint(error.missing, error.unexpected)}{base_hint(trees, error.reshaped)}",
            missing=error.missing,
            unexpected=error.unexpected,
            reshaped=error.reshaped,
        ) from None


@checked_keywords
def best(run_dir: str | Path) -> dict[str, BestRecord]:
    """Return the best weights of a run by metric, as its newest checkpoint names them.

        everstep.best("runs/digits")["valid_loss"].value

    Raises:
        RunDirError: the path is not a run; names runs nearby.
    """
    store = Store(RunJournal(to_read(user_path(run_dir, "run_dir"))).run_dir)
    found = {}
    for metric, path in store.best().items():
        saved = read_manifest(path)
        value = (saved["meta"] or {}).get("value")
        if value is None:
            raise DamagedCheckpointError(
                f"checkpoint {path.name} is damaged: {path} does not say the value of {metric!r}"
            )
        found[metric] = BestRecord(metric, value, saved["step"], saved["epoch"], str(path))
    return found
