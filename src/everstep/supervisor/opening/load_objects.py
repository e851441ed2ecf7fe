"""Loading of a run's saved objects in another script, without opening the run."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from everstep.arguments import checked_keywords
from everstep.checkpoint import Checkpoint, Store, read_manifest
from everstep.errors import RestoreError, nearest
from everstep.record import RunJournal, to_read, user_path
from everstep.supervisor.leaving.ending import BestRecord
from everstep.supervisor.opening.init_from import InitFrom
from everstep.supervisor.opening.wrapper_names import hint
from everstep.supervisor.saving.state_tree import reading, saved_tree
from everstep.supervisor.saving.user_state import UserState


@dataclass(frozen=True)
class Loaded:
    """Source of loaded objects.

    Attributes:
        path: the checkpoint's folder.
        step, epoch: step and epoch of the run at the save.
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
            `RUN/best/METRIC` (the best weights), or an `InitFrom` that chooses and renames.
        state: name to object, under the names of the run's `state`.

    Raises:
        RestoreError: the checkpoint lacks an entry, or an entry does not fit; has the three lists, and
            nothing is loaded.
        NoCheckpointError: there is no checkpoint.
        CheckpointError: the checkpoint is damaged.
    """
    chosen = source if isinstance(source, InitFrom) else InitFrom(user_path(source, "source"))
    notes: list[str] = []
    checkpoint = chosen.read(notes.append)
    user = UserState(state)
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
    for note in notes:
        warnings.warn(note, RuntimeWarning, stacklevel=3)
    return Loaded(where, checkpoint.step, checkpoint.epoch, checkpoint.digest, _seed_in(checkpoint))


def _seed_in(checkpoint: Checkpoint) -> int | None:
    structure: Any = checkpoint.structure
    if "progress" not in structure:
        return None
    return int(saved_tree(checkpoint, ("progress",))["progress"]["seed"])


def _only(checkpoint: Checkpoint, names: Collection[str]) -> Checkpoint:
    """Reduce a checkpoint to some entries: others may need a framework that is not installed here."""
    user = checkpoint.structure.get("user") if isinstance(checkpoint.structure, dict) else None
    if not isinstance(user, dict) or any(name.startswith("$") for name in user):
        return checkpoint
    return replace(checkpoint, structure={"user": {name: user[name] for name in names if name in user}})


def _check(user: UserState, trees: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    structure: Any = checkpoint.structure
    try:
        user.check(trees, str(checkpoint.path))
    except RestoreError as error:
        unknown = [
            f"{name!r}: {nearest(name, structure['user'])}; " for name in user.entries if name not in trees
        ]
        raise RestoreError(
            f"{checkpoint.path} does not fit these objects; {''.join(unknown)}make them as in the run, "
            "under the same names, or take parts with everstep.load(InitFrom(path, include=..., rename=...), "
            f"state){hint(error.missing, error.unexpected)}",
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
        value = saved["meta"]["value"]
        found[metric] = BestRecord(metric, value, saved["step"], saved["epoch"], str(path))
    return found
