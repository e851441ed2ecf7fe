"""A fork: a run of its own that begins with a copy of another run's checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.checkpoint import Checkpoint, CheckpointName, Store, names_inside
from everstep.durable import discard, discard_leftovers, fsync_folder, rename, temporary
from everstep.errors import CheckpointError, RunDirError
from everstep.record import RunDir, located, new_id


@dataclass(frozen=True)
class Fork:
    """A run that goes on from a checkpoint of another run, with another config.

    Attributes:
        run_dir: that run's directory.
        checkpoint: where it begins.
        tree: its config.
        digest: of what touches the training in it.
    """

    run_dir: Path
    checkpoint: Checkpoint
    tree: dict[str, Any]
    digest: str

    def place(self) -> tuple[Path, bool]:
        """Its directory, RUN-fork-N, and whether it was begun there before."""
        run = RunDir.open(self.run_dir, create=False).id
        for number in itertools.count(1):
            folder = self.run_dir.with_name(f"{self.run_dir.name}-fork-{number}")
            facts = facts_of(folder)
            is_there = facts.get("parent", {}).get("run") == run and facts.get("config") == self.digest
            if is_there or not facts:
                break
        return folder, is_there

    def begin(self) -> tuple[Path, bool]:
        """Its directory, once it is there, and whether this has made it.

        Raises:
            RunDirError: it cannot be made.
        """
        folder, is_there = self.place()
        if is_there:
            return folder, False
        return (folder, True) if self._made(folder) else self.begin()

    def _made(self, folder: Path) -> bool:
        """Make it, whole or not at all; False if another one has the name by now.

        It has the checkpoint from the beginning: the other run may let it go before there is a next one.
        """
        folder = located(folder).absolute()
        new = temporary(folder)
        try:
            discard_leftovers(folder.parent, "fork", f"{self.run_dir.name}-fork-")
            self._write(new, new_id(folder))
            rename(new, folder, "fork")
            fsync_folder(folder.parent, "fork")
        except OSError as error:
            if facts_of(folder):
                return False
            if isinstance(error, RunDirError):
                raise
            raise RunDirError(
                error.errno, f"the fork cannot be made: {error.strerror}; see to its folder", str(folder)
            ) from error
        finally:
            discard(new, "fork")
        return True

    def _write(self, new: Path, run: str) -> None:
        origin = RunDir.open(self.run_dir, create=False)
        parent = {
            "run": origin.id,
            "path": str(self.checkpoint.path.absolute()),
            "checkpoint": str(self.checkpoint.name),
        }
        about = {"id": run, "parent": parent, "config": self.digest}
        store = Store(RunDir.open(new, seed=origin.seed, about=about).path, 0, print, run)
        for checkpoint in (*self._inside(), self.checkpoint):
            store.adopt(checkpoint, journal=None, config=self.tree)

    def _inside(self) -> list[Checkpoint]:
        """Where a raised limit may go on inside the epoch that the checkpoint had cut short."""
        if not self.checkpoint.partial:
            return []
        there = Store(self.checkpoint.path.parent.parent, 0, print)
        found = []
        for name in names_inside(self.checkpoint.name):
            if name in there.names():
                try:
                    found.append(there.read(name))
                except CheckpointError:
                    continue
        return found


def facts_of(run_dir: Path) -> dict[str, Any]:
    """Of `run.json`; none where there is no run."""
    folder = located(run_dir)
    return RunDir.open(folder, create=False).facts if (folder / "run.json").exists() else {}


def is_as_begun(run_dir: Path, facts: Mapping[str, Any]) -> bool:
    """Whether a fork has no checkpoint but its parent's yet."""
    names = Store(located(run_dir), 0, lambda _: None).names()
    return not names or names[-1] <= CheckpointName.parse(facts["parent"]["checkpoint"])
