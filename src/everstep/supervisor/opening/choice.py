"""Choice of the checkpoint that a start continues from: the writer's, which all ranks read."""

from __future__ import annotations

from pathlib import Path

from everstep.checkpoint import Checkpoint, Store, names_inside, read_checkpoint
from everstep.contracts.group import Group
from everstep.errors import DamagedCheckpointError, RestoreError
from everstep.record import Rollback, RunDir, RunJournal, to_read, user_path
from everstep.supervisor.settings import Settings
from everstep.supervisor.voice import Voice


class Choice:
    """The checkpoint that a start continues from, and what a person has chosen with it.

    Args:
        start: the arguments of this start.
        run_dir, store, journal: those of the run.
        voice: tells the user.
        group: the ranks of the run; the writer chooses.

    Attributes:
        rollbacks: the rollbacks decided in the history that this start continues.
        chosen: a person's choice that rules out a comparison with earlier executions; else "".
        request: checkpoint that the program asks for, as the journal records it; None for the newest.
    """

    def __init__(
        self,
        settings: Settings,
        run_dir: RunDir,
        store: Store,
        journal: RunJournal,
        voice: Voice,
        group: Group,
    ) -> None:
        self._settings, self._run_dir, self._store = settings, run_dir, store
        self._journal, self._voice, self._group = journal, voice, group
        self.rollbacks: list[Rollback] = []
        self.chosen = ""
        self.request: str | None = None

    def checkpoint(self) -> Checkpoint | None:
        """Choose a checkpoint, or follow the writer's choice; None where the run starts from nothing."""
        return self._shared(self._choose() if self._group.writer else None)

    def _shared(self, chosen: Checkpoint | None) -> Checkpoint | None:
        """Share the writer's choice: all ranks read the same checkpoint, and continue the same history.

        Raises:
            RestoreError: this rank reads another checkpoint than the writer.
        """
        if self._group.size == 1:
            return chosen
        mine = {
            "checkpoint": None if chosen is None else [self._place(chosen.path), chosen.digest],
            "rollbacks": [rollback.stored() for rollback in self.rollbacks],
            "chosen": self.chosen,
            "request": self.request,
        }
        told = self._group.share(mine, "the choice of a checkpoint")
        if self._group.writer:
            return chosen
        self.rollbacks = Rollback.among(tuple(each) for each in told["rollbacks"])
        self.chosen, self.request = told["chosen"], told["request"]
        if told["checkpoint"] is None:
            return None
        place, digest = told["checkpoint"]
        checkpoint = read_checkpoint(
            self._run_dir.path / place, self._group.rank, regions=self._store.regions
        )
        if checkpoint.digest != digest:
            raise RestoreError(
                f"rank {self._group.rank} reads another state in {checkpoint.path} than rank 0 (digest "
                f"{checkpoint.digest}, not {digest}); give all ranks one directory, on a file system that "
                "all of them see"
            )
        return checkpoint

    def _place(self, path: Path) -> str:
        """Return a path as all ranks find it: below the run directory, which they may see elsewhere."""
        inside = path.is_relative_to(self._run_dir.path)
        return str(path.relative_to(self._run_dir.path) if inside else path.absolute())

    def _choose(self) -> Checkpoint | None:
        asked = self._settings.resume
        if asked is False:
            if self._store.names():
                self._store.continue_from(None)
                self._voice.say(
                    "resume=False: this run starts over; its checkpoints move to superseded/ when it saves"
                )
            return None
        self.rollbacks = self._journal.rollbacks()
        # at whichever start comes next: a kill may have followed the decision at once
        for rollback in self.rollbacks:
            self._store.abandon(rollback.first, rollback.segment)
        if isinstance(asked, str | Path) and Path(asked).name != str(asked):  # a path, not a name
            asked = to_read(user_path(asked, "resume"))
            # a path to a checkpoint of this run stands for its name: only another run's is copied
            if asked.parent.resolve() == self._run_dir.checkpoints.resolve():
                asked = asked.name
        self.request = None if asked is True else str(asked.resolve() if isinstance(asked, Path) else asked)
        checkpoint, notes = self._begun() or self._store.find(asked)
        for note in notes:
            self._voice.say(note)
        if checkpoint is not None and any(name > checkpoint.name for name in self._store.names()):
            self.chosen = "another checkpoint than the newest"
        return checkpoint

    def _begun(self) -> tuple[Checkpoint, list[str]] | None:
        """Find the newest checkpoint, if a start with the same `resume=` was the last to act; None if not.

        To act is to save a checkpoint, or to decide a rollback, which may lead to before the checkpoint that
        is asked for.  A program that is killed and started again continues, and does not go back twice.
        """
        starts = self._journal.events("segment", valid=False)
        same = {e.segment for e in starts if e.data.get("facts", {}).get("resume") == self.request}
        if self.request is None or not same:
            return None
        newest, notes = self._store.find(True)
        if newest is None or max([newest.segment, *(each.segment for each in self.rollbacks)]) not in same:
            return None
        self._voice.say(
            f"resume={self._settings.resume!r} was followed before: the run continues from there; to go back "
            f"again, name the checkpoint in the first line of {self._run_dir.path / 'checkpoint'}"
        )
        return newest, notes

    def inside(self, closed: Checkpoint, reopened: str) -> Checkpoint:
        """Find the checkpoint inside the epoch that `closed` had cut short: at its last step, or one before.

        There is none where the program left the last step by `break`, or asked for the stop after the
        steps: then `closed` is returned.
        """
        why: object = "there is no checkpoint inside it"
        for name in names_inside(closed.name):
            path = closed.path.with_name(str(name))
            if path.exists():
                try:
                    inside = read_checkpoint(path, self._group.rank, regions=self._store.regions)
                except DamagedCheckpointError as error:
                    why = error
                else:
                    self._voice.say(f"{reopened}: the epoch continues from {name}")
                    return inside
        self._voice.say(f"{reopened}: epoch {closed.epoch} stays cut short and the next one begins ({why})")
        return closed
