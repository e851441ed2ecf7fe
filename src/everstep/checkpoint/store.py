"""Store of the checkpoints in one run directory: commit, set aside, retain; `SavedCheckpoints` reads them.

checkpoints/NAME/       the checkpoints; the newest whole one wins
checkpoint              a person's choice of another one, followed once; see `supersede_after`
damaged/, superseded/   NAME.segment-N: set aside by the run's N-th start, never resumed from
pins.json               names that retention never deletes
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from everstep.checkpoint import files, format
from everstep.checkpoint.best_weights import BestWeights
from everstep.checkpoint.checkpoint_name import CheckpointName
from everstep.checkpoint.commit import (
    Commit,
    CommittedCheckpoint,
    copying,
    place,
    place_apart,
    require_finite,
    writing,
)
from everstep.checkpoint.exchange import WriterExchange
from everstep.checkpoint.format import Checkpoint
from everstep.checkpoint.retention import Retention, expendable
from everstep.checkpoint.saved_checkpoints import SavedCheckpoints
from everstep.contracts.state import Json
from everstep.durable import TMP, remedy, require_no_link
from everstep.errors import (
    CheckpointError,
    DamagedCheckpointError,
    ForeignCheckpointError,
    NoCheckpointError,
    nearest,
)

_REPLACED = ".replaced"


class Store(SavedCheckpoints):
    """Checkpoints of a run that this process trains, each whole or absent at any instant.

    Its user holds the run's lock.  Methods may run on a worker thread, one at a time.  Nothing is
    created before the first commit.

    Args:
        run_dir: the run directory, which exists.
        segment: number of this start, for manifests and for the names in damaged/ and superseded/; 0 to read.
        say: takes sentences for the user; by default nobody reads them.
        run: the run's id, which each checkpoint must have; None reads checkpoints of any run.
        require_newest: raises if a later start has taken over the run; called before each rename of a commit.

    Attributes:
        best_weights: the run's best weights.
    """

    def __init__(
        self,
        run_dir: Path,
        segment: int = 0,
        say: Callable[[str], None] = lambda text: None,
        run: str | None = None,
        require_newest: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(run_dir, run)
        self.segment = segment
        self._say, self._require_newest = say, require_newest
        self.best_weights = BestWeights(self, segment, say)
        self._chosen: Checkpoint | None = None

    def find(
        self, which: bool | int | str | Path, *, interim: bool = True
    ) -> tuple[Checkpoint | None, list[str]]:
        """Find the checkpoint to resume from, and repair what a kill left unfinished; see the base class.

        After a resume from it, call `continue_from`: a later checkpoint must not win at the next start.
        """
        if self.segment:
            self._finish_replacements()
        return super().find(which, interim=interim)

    def _finish_replacements(self) -> None:
        """Give checkpoints their names back that a kill caught while they were replaced, see `_put`."""
        for old in sorted(self.folder.glob(f"*{_REPLACED}*")):
            text = old.name.partition(_REPLACED)[0]
            if not CheckpointName.matches(text):
                continue
            name = CheckpointName.parse(text)
            if self.path(name).exists():
                self._supersede(old, name)
            else:
                require_no_link(old, self.run_dir)
                files.rename(old, self.path(name))
                files.fsync_folder(self.folder)

    def clean(self) -> None:
        """Delete unfinished files of dead processes; to be called before the first commit."""
        apart = [
            path.parent
            for top in ("best", "exports", "dumps")
            for path in (self.run_dir / top).rglob(f"{TMP}*")
        ]
        for folder in (
            self.run_dir,
            self.folder,
            self.run_dir / "superseded",
            self.run_dir / "best",
            *apart,
        ):
            require_no_link(folder, self.run_dir)
            files.discard_leftovers(folder)

    # ------------------------------------------------------------------------------------ commit

    def commit(self, commit: Commit, ranks: WriterExchange | None = None) -> CommittedCheckpoint:
        """Write a checkpoint, durable and whole, or leave the directory as it was.

        A whole checkpoint of that name with the same digest is kept; with another digest it moves to
        `superseded/`; a damaged one moves to `damaged/`.

        Args:
            ranks: on several ranks, the writer's exchange, inside its `save`; None on one process.

        Raises:
            RunLockedError: a later start has taken over the run.
            NonFiniteError: a guarded array has NaN or infinity; nothing was written.
            CheckpointError: the values cannot be written in this format.
            OSError: the disk failed; nothing of this checkpoint is left.
        """
        name, digest = commit.name, commit.digest
        # first: a bad state leaves the directory as it was
        require_finite(name, {**commit.common.arrays, **commit.own.arrays}, commit.guarded)
        held = self._held(name)
        if ranks is not None:
            # a rank that was stopped must find no folder of a later save under the name that it has heard
            write = ranks.leading(commit, self.segment, held)
            self._put(name, held, None, write, token=secrets.token_hex(4))
            return ranks.committed(commit, self.folder)
        size = self._put(name, held, digest, writing(commit, self.segment))
        return CommittedCheckpoint(name, self.path(name), size, size == 0, digest)

    def _put(
        self,
        name: CheckpointName,
        held: Checkpoint | None,
        digest: str | None,
        write: Callable[[Path], int],
        token: str = "",
    ) -> int:
        """Let `write` fill the folder of a checkpoint, unless `held`, which has the name, is an equal one.

        Returns:
            Number of bytes written; 0 if the equal one was kept.
        """
        moved: Path | None = None

        def make_room() -> Path | None:
            nonlocal moved
            # as late as possible: a process that was stopped may wake up at any instruction
            self._require_newest()
            if self.path(name).exists() and held is None:
                self._set_aside(name, "damaged")
            elif held is not None:
                # a kill here leaves it where the next start finds it: it may be the only checkpoint
                moved = files.move(self.path(name), self.folder, f"{name}{_REPLACED}", top=self.run_dir)
            return moved

        size = 0
        if held is None or held.digest != digest:
            files.make_dir(self.folder)
            size = place(self.path(name), write, make_room, token)
            self._forget(name)
        if moved is not None and held is not None:
            with contextlib.suppress(OSError):  # the commit stands; the next start tries again
                if _is_open(held):  # the new checkpoint is of the same boundary, run to its end
                    files.retire(moved, top=self.run_dir)
                else:
                    self._supersede(moved, name)
        return size

    def _held(self, name: CheckpointName) -> Checkpoint | None:
        """Read the checkpoint that has a name; None if it is missing, damaged or another run's."""
        require_no_link(self.path(name), self.run_dir)
        if not self.path(name).exists():
            return None
        try:
            return self.read(name)
        except (DamagedCheckpointError, ForeignCheckpointError) as error:
            self._say(f"{error}; the folder moves to damaged/")
            return None

    def adopt(self, checkpoint: Checkpoint, **facts: Json) -> dict[str, Json]:
        """Commit a copy of another run's checkpoint, with the best weights that it names.

        Args:
            facts: values that replace those of the same name in its `meta`.

        Returns:
            `meta` of the copy.
        """
        foreign: Any = checkpoint.meta
        meta: dict[str, Json] = {**foreign, **facts, "run": self.run}
        # weights first: after a kill in between, no checkpoint here names weights that are missing
        self.best_weights.adopt(checkpoint)
        write = copying(checkpoint, self.segment, meta)
        self._put(checkpoint.name, self._held(checkpoint.name), checkpoint.digest, write)
        return meta

    def copy(self, name: CheckpointName, folder: Path) -> Path:
        """Copy a checkpoint out of the run; returns the new folder.

        Args:
            folder: the folder to be made is `folder/NAME`; `folder` is made, too, if it is missing.
        """
        self._require(name)
        target = folder.absolute() / str(name)
        if os.path.lexists(target):
            raise CheckpointError(f"{target} exists already: choose another folder, or move it away")
        place_apart(target, lambda new: format.copy(self.path(name), new), top=folder.absolute())
        return target

    def _set_aside(self, name: CheckpointName, where: str) -> None:
        target = f"{name}.segment-{self.segment}"
        files.move(self.path(name), self.run_dir / where, target, top=self.run_dir)
        self._forget(name)

    def _supersede(self, folder: Path, name: CheckpointName) -> None:
        files.move(folder, self.run_dir / "superseded", f"{name}.segment-{self.segment}", top=self.run_dir)

    def _forget(self, name: CheckpointName) -> None:
        self._facts.pop(name, None)
        self.damaged.discard(name)

    # ------------------------------------------------------------------------------------ setting aside

    def continue_from(self, checkpoint: Checkpoint | None) -> None:
        """Leave later checkpoints, or all for None: they do not count any more, and `settle` moves them.

        A start that is refused before `settle` leaves the directory as it was.

        Args:
            checkpoint: a checkpoint of this run; or of another run, which `settle` copies here.
        """
        there, self._chosen = self._on_disk(), checkpoint
        if checkpoint is not None:
            taken = checkpoint.path != self.path(checkpoint.name)
            there = [n for n in there if n > checkpoint.name or (taken and n == checkpoint.name)]
        self._left = frozenset(there)

    @property
    def settled(self) -> bool:
        """Whether the next start finds exactly the checkpoints that this start continues from."""
        return self._chosen is None and not self._left

    @property
    def leaves_some(self) -> bool:
        """Whether checkpoints are on disk that `settle` will set aside."""
        return bool(self._left)

    def settle(self) -> None:
        """Make the choice of `continue_from` durable for later starts; called before the first save."""
        if self.settled:
            return
        chosen = self._chosen
        if chosen is None:
            self.supersede_all()
        else:
            if chosen.path != self.path(chosen.name):
                self.adopt(chosen, journal=None, rollbacks=[])
            self.supersede_after(chosen.name)
        self._chosen, self._left = None, frozenset()

    def supersede_after(self, name: CheckpointName) -> None:
        """Let later starts continue from `name`: later checkpoints go to superseded/, or damaged/.

        The file `checkpoint` names it until all have moved, so that a start after a kill in between still
        resumes from `name`; then the file goes, as it was followed.
        """
        self._require(name)
        later = [other for other in self._on_disk() if other > name]
        if later:
            files.write_whole(self.choice_file, f"{name}\n".encode())
        for other in reversed(later):
            self._set_aside(other, "damaged" if other in self.damaged else "superseded")
        self._forget_choice()

    def _forget_choice(self) -> None:
        if os.path.lexists(self.choice_file):
            files.unlink(self.choice_file)
            files.fsync_folder(self.run_dir)

    def abandon(self, step: int, segment: int) -> None:
        """Set aside the checkpoints of `step` and later steps that starts up to `segment` saved.

        After a kill in the middle it is called again.
        """
        gone = [one.name for one in self.facts() if one.name.step >= step and one.segment <= segment]
        if not gone:
            return
        if not set(self.names()) - set(gone):
            raise CheckpointError(
                f"the run goes back to before step {step}, and {self.folder} has no checkpoint of that "
                f"time: bring one back, or start over with resume=False"
            )
        for name in reversed(gone):
            self._set_aside(name, "superseded")

    def supersede_all(self) -> None:
        """Set every checkpoint aside, so that the next start begins from nothing.

        After a kill in the middle, the next start takes the newest that is left.
        """
        self._forget_choice()
        for name in reversed(self._on_disk()):
            self._set_aside(name, "superseded")

    # ------------------------------------------------------------------------------------ retention

    def retain(self, policy: Retention, needed: Collection[CheckpointName] = ()) -> list[CheckpointName]:
        """Delete the checkpoints that `policy` does not keep; reads manifests only; called after a commit.

        The newest whole checkpoint stays, and so do the name in the `checkpoint` file, pinned and damaged
        checkpoints.  An error of the disk is a sentence for the user, because the commit stands.

        Args:
            needed: names that stay this time.

        Returns:
            Names of the deleted checkpoints, oldest first.
        """
        deleted = []
        for name in self.expendable(policy):
            if name in needed:
                continue
            try:
                files.retire(self.path(name), top=self.run_dir)
            except OSError as error:
                why = f"{error.strerror}; {remedy(error)}"
                self._say(f"old checkpoint {self.path(name)} could not be deleted ({why})")
                break
            self._forget(name)
            deleted.append(name)
        return deleted

    def expendable(self, policy: Retention) -> list[CheckpointName]:
        """List the names that `retain` would delete now, oldest first."""
        present = self.facts()
        try:
            # a checkpoint that a person named must be there when the next start follows the choice
            chosen = self.chosen_by_hand()
            protected = self.pins() | {facts.name for facts in present if str(facts.name) == chosen}
        except CheckpointError as error:
            self._say(f"no old checkpoint is deleted: {error}")
            return []  # without the pins nobody knows which checkpoints must stay
        return expendable(policy, present, protected)

    def pin(self, name: CheckpointName) -> None:
        """Keep a checkpoint, whatever retention says."""
        self._require(name)
        self._write_pins(self.pins() | {name})

    def unpin(self, name: CheckpointName) -> None:
        """Let retention decide about a checkpoint again."""
        pinned = self.pins()
        if name not in pinned:
            raise NoCheckpointError(
                f"checkpoint {name} is not pinned: {nearest(str(name), map(str, pinned))}"
            )
        self._write_pins(pinned - {name})

    def _write_pins(self, names: Collection[CheckpointName]) -> None:
        text = json.dumps(sorted(map(str, names)), indent=1)
        files.write_whole(self.pins_file, text.encode() + b"\n")


def _is_open(checkpoint: Checkpoint) -> bool:
    """Whether an interruption left its boundary inside an evaluation."""
    return isinstance(checkpoint.meta, dict) and bool(checkpoint.meta.get("open"))
