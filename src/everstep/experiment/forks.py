"""A fork: a run of its own that begins with a copy of another run's checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.checkpoint import Checkpoint, CheckpointName, Store, names_inside
from everstep.durable import discard, discard_leftovers, fsync_folder, rename, temporary
from everstep.record import RunDir, located, new_id
from everstep.supervisor.saving.state_tree import reading, saved_tree
from everstep.supervisor.saving.user_state import UserState


@dataclass(frozen=True)
class Fork:
    """A run with a config of its own that begins with a checkpoint of the run in `run_dir`."""

    run_dir: Path
    checkpoint: Checkpoint
    tree: dict[str, Any]
    digest: str
    """Digest of the part of the config that touches the training."""

    def place(self) -> tuple[Path, bool]:
        """Return the fork's directory, RUN-fork-N, and whether the fork was begun there before."""
        run = RunDir.open(self.run_dir, create=False).id
        for number in itertools.count(1):
            folder = self.run_dir.with_name(f"{self.run_dir.name}-fork-{number}")
            facts = _facts(folder)
            is_there = facts.get("parent", {}).get("run") == run and facts.get("config") == self.digest
            if is_there or not facts:
                break
        return folder, is_there

    def begin(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Make the fork's directory, whole or not at all; not for a state that the checkpoint does not fit.

        The checkpoint is copied at once: the other run may delete it before the fork has saved a checkpoint.
        """
        user = UserState(state)
        with ExitStack() as stack, reading(self.checkpoint.path, "user"):
            user.open(stack)
            user.check(saved_tree(self.checkpoint, ("user",))["user"], f"checkpoint {self.checkpoint.path}")
        folder = located(folder).absolute()
        new = temporary(folder)
        try:
            discard_leftovers(folder.parent, "fork", f"{self.run_dir.name}-fork-")
            self._write(new, new_id(folder))
            rename(new, folder, "fork")
            fsync_folder(folder.parent, "fork")
        finally:
            discard(new, "fork")

    def _write(self, new: Path, run: str) -> None:
        origin = RunDir.open(self.run_dir, create=False)
        path, name = self.checkpoint.path, self.checkpoint.name
        parent = {"run": origin.id, "path": str(path.absolute()), "checkpoint": str(name)}
        about = {"id": run, "parent": parent, "config": self.digest}
        store = Store(RunDir.open(new, seed=origin.seed, about=about).path, 0, print, run)
        # Of an epoch that a limit cut short also the checkpoints inside, from which a resume completes it.
        there = Store(path.parent.parent, say=print)
        inside = set(names_inside(name)) & set(there.names()) if self.checkpoint.partial else ()
        for checkpoint in (*map(there.read, sorted(inside)), self.checkpoint):
            store.adopt(checkpoint, journal=None, config=self.tree)


def is_unsaved_fork(run_dir: Path, digest: str) -> bool:
    """Whether a run is the fork with this config, and has no checkpoint yet but the copy of its parent's."""
    facts = _facts(run_dir)
    if facts.get("parent") is None or facts.get("config") != digest:
        return False
    names = Store(located(run_dir)).names()
    return not names or names[-1] <= CheckpointName.parse(facts["parent"]["checkpoint"])


def _facts(run_dir: Path) -> dict[str, Any]:
    folder = located(run_dir)
    return RunDir.open(folder, create=False).facts if (folder / "run.json").exists() else {}
