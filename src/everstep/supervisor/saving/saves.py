"""Saves: which boundaries become checkpoints, and when a copy that is kept is committed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from everstep.checkpoint import CheckpointName, Phase
from everstep.contracts.services import Action, Moment, Save, SaveBest, Service
from everstep.errors import CheckpointError, DivergedRanksError, NonFiniteError, NotResumableError
from everstep.services.best import Best
from everstep.services.checkpoints import Checkpoints
from everstep.services.judges import NaNGuard
from everstep.state import split
from everstep.supervisor.saving.cadence import Cadence
from everstep.supervisor.saving.replicas import difference, leaf_digests
from everstep.supervisor.saving.snapshot import Snapshot, take_snapshot

if TYPE_CHECKING:
    from everstep.supervisor.engine import Engine


class Saves:
    """Decides at each boundary what becomes a checkpoint.

    The state of one step is copied once (a `Snapshot`); the newest copy stays in the kept buffers, and is
    committed when it is asked for, at once or later.

    Attributes:
        asked: whether a save is asked for at the next boundary.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._saver = engine, engine.saver
        rule = engine.board.need(Checkpoints)
        # measuring costs each boundary a little
        self._cadence = Cadence(engine, rule.schedule) if rule.schedule.learns else None
        self.asked = False
        self._first_open = False
        """Whether the checkpoint of step 0, the trial save, may still be uncommitted."""
        self._snapshot: Snapshot | None = None
        """The newest copy, taken at a boundary or where an epoch's steps ended."""
        self._kept_only = False
        """Whether the newest copy was not handed to the writer."""
        self._reserved = False

    def ask(self) -> None:
        """Ask for a save at the next boundary."""
        self.asked = True

    @property
    def step(self) -> int:
        """The step of the newest copy, committed or kept."""
        return self._engine.recovered.step if self._snapshot is None else self._snapshot.name.step

    def one_before(self) -> bool:
        """Whether the newest copy is from one step before the last complete step.

        After a step loop of one step, a copy from before the last step of the loop ahead counts too: with
        loops of steps 1 to 3 and of step 4 alone, step 4 accepts a copy of step 2; both steps run again.
        """
        current = self._engine.progress
        behind = current.step - self.step
        return behind == 1 or (behind == 2 and current.call_start == current.step - 1)

    def save_first(self) -> None:
        """Begin the checkpoint of step 0; the first boundary waits for it."""
        self._first_open = True
        self.save([(None, Save())], "epoch")

    def save(self, actions: Sequence[tuple[Service | None, Action]], phase: Phase) -> None:
        """Copy the state once for all that asked for a save here.

        After the last step of a step loop the copy of one step before is committed instead, if there is such
        a copy.  A resume from after that step would enter the loop and run no step: names that the program
        assigns in the loop and uses in the epoch's tail would not exist.  So the last step runs again: in
        epochs of 10 steps, a save that is due after step 10 commits step 9, and step 10 at the epoch's end.
        """
        engine = self._engine
        if self._cadence is not None:
            self._cadence.begin()
        best = [action for _, action in actions if isinstance(action, SaveBest)]
        whole = any(isinstance(action, Save) for _, action in actions)
        if not (best or whole) or not self._is_good():
            return
        self._forget_lost_best()
        left = engine.loop.steps_left() if phase == "step" else None
        last = left is not None and left < 1 and self.one_before()
        if last:
            # an interruption leaves here; otherwise the copy only stands in until the epoch's end
            self.commit_kept(interim=engine.decisions.interruption is None)
        self.asked = last and (whole or self.asked)  # then at the epoch's end
        whole = whole and not last
        if not (best or whole):
            return
        if whole and self._cadence is not None:
            self._cadence.learn()
        name = self._name(phase)
        for service, action in actions:
            if isinstance(service, Best) and isinstance(action, SaveBest):
                # before the copy, whose manifest names the best weights
                service.keep_as(str(name), name.step)
        self._snapshot = self._copied(name, phase, best)
        if self._snapshot is None:
            return
        self._saver.commit(self._snapshot, best, whole=whole)
        if whole and self._cadence is not None:
            self._cadence.hand_over()
        self._kept_only = not (whole or last)
        if self._kept_only and not self._saver.copies:
            # the live arrays will not be these any more
            self._snapshot, self._kept_only = None, False

    def keep(self, phase: Phase) -> None:
        """Copy the current state, to be committed if an interruption comes before the next boundary."""
        name = self._name(phase)
        if self._snapshot is not None and self._snapshot.name == name:
            return
        # the state at the resume point is on disk already
        if self._engine.recovered.checkpoint == str(name):
            return
        self.await_first()
        if not self._is_good():
            return
        self._forget_lost_best()
        try:
            found: Snapshot | NotResumableError | None = self._copied(name, phase)
        except NotResumableError as error:
            found = error  # raised only where a save is really asked for
        self._snapshot, self._kept_only = None if found is None else self._saver.kept(found), True

    def _copied(self, name: CheckpointName, phase: Phase, best: Sequence[SaveBest] = ()) -> Snapshot | None:
        """Copy the current state; None if there is no memory for the copy, which is a failed save.

        Several ranks end instead: one that has no copy may not leave the others to a save without it.
        """
        try:
            return take_snapshot(self._engine, name, phase)
        except MemoryError as error:
            if self._engine.ranks.several:
                raise
            self._saver.failed(error, str(name), best)
            return None

    def commit_kept(self, *, interim: bool = False) -> None:
        """Commit the newest copy, unless it is committed already.

        Args:
            interim: whether the copy was not asked for, and only stands in until the epoch's end.
        """
        if self._kept_only and self._snapshot is not None and not self._engine.user.tainted:
            self._snapshot.meta["interim"] = interim
            self._saver.commit(self._snapshot)
            self._kept_only = False

    def reserve(self) -> None:
        """Reserve buffers after the first update, for optimizers' moments: no save must stall for them."""
        if not self._reserved and self._engine.user.updates and not self._saver.busy:
            self._reserved = True
            self._saver.reserve(self._engine.user.arrays())

    def await_first(self) -> None:
        """Wait for the checkpoint of step 0: no row reaches the journal before it.

        Raises:
            CheckpointError: the save failed.
        """
        if self._first_open:
            self.settle(wait=True)
            if self._saver.error is not None:
                raise CheckpointError(
                    f"the trial save at step 0 failed: {self._saver.error}; {self._saver.remedy}, or choose "
                    "another run directory, before training"
                ) from self._saver.error
            self._first_open = False

    def await_commit(self) -> None:
        """Wait until the writer has committed what it was given.

        Raises:
            CheckpointError: the newest save failed.
        """
        self.settle(wait=True)
        error = self._saver.error
        if error is not None:
            raise CheckpointError(
                f"the last state could not be saved: {error}; {self._saver.remedy} and start again: "
                "the run continues from the previous checkpoint"
            ) from error

    def settle(self, *, wait: bool = False) -> None:
        """Announce the new commits of the writer thread, in the journal and to observers.

        Args:
            wait: whether to wait for the running write first.
        """
        engine = self._engine
        try:
            self._saver.settle(wait=wait)
        except NonFiniteError as error:
            # found in the bytes to be committed: the guard decides, as for a value of a step
            guard = engine.board.need(NaNGuard)
            actions = guard.tripped(str(error), error.step).actions
            engine.decisions.apply([(guard, action) for action in actions])
        except DivergedRanksError as error:
            raise self._difference(error) from None
        if self._cadence is not None:
            self._cadence.failed(self._saver.error)
        for committed in self._saver.take_committed():
            if self._cadence is not None:
                self._cadence.written()
            name = str(committed.name)
            engine.verifier.committed(committed.name.step)
            engine.journal.event("checkpoint", {"name": name, "bytes": committed.bytes}, wall=True)
            engine.announcer.fire(Moment.AFTER_CHECKPOINT, name)

    def _forget_lost_best(self) -> None:
        """Name no best weights that a failed save has not kept; no later save has them."""
        engine = self._engine
        tried, self._saver.in_doubt = self._saver.in_doubt, []
        if not tried:
            return
        kept = engine.opening.store.best_weights.has
        lost = [[metric, name] for metric, name, value in tried if not kept(metric, name, value)]
        # the writer's view: what it deletes depends on these names, and all ranks must ask for the same
        for metric, name in engine.ranks.group.share(lost, "best weights of a failed save"):
            for service in engine.board.all(Best):
                if service.metric == metric:
                    service.not_kept(name)
            engine.voice.warn(
                f"the weights of the best {metric} in {name} are not kept, as their save has failed"
            )

    def _difference(self, error: DivergedRanksError) -> Exception:
        """Find the first leaf that differs; every rank has failed that save, and calls this."""
        snapshot = self._snapshot
        # a rank that leaves alone finds nobody to compare with
        if snapshot is None or self._engine.ranks.group.failure() is not None:
            return error
        common, own = split(snapshot.encoded, snapshot.own)
        group = self._engine.ranks.group
        mine = leaf_digests(common, error.name, own, group.data.together(group.rank))
        return difference(error.name, group.gather(mine, "a state that differs"))

    def _is_good(self) -> bool:
        """Whether the state may be saved; the kept buffers are free once that is known."""
        # first: the guard, or an earlier write, may find that the state is bad
        engine = self._engine
        guard = engine.board.find(NaNGuard)
        # at most boundaries the guard has run before, and nothing was collected since
        if guard is not None and engine.board.reader(guard).names():
            engine.decisions.apply(engine.board.run([guard], engine.announcer.view(Moment.AFTER_STEP)))
        self.settle(wait=True)
        return not engine.user.tainted

    def _name(self, phase: Phase) -> CheckpointName:
        current = self._engine.progress
        return CheckpointName(current.step, current.epoch if phase == "epoch" else None)
