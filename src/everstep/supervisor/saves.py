"""Saves of states at boundaries: asked for, copied, kept in case they are needed, committed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from everstep.checkpoint import CheckpointName, Phase
from everstep.contracts.services import Action, Save, SaveBest, Service
from everstep.errors import CheckpointError, NotResumableError
from everstep.services.best import Best
from everstep.supervisor.progress import Progress
from everstep.supervisor.recovered import Recovered
from everstep.supervisor.saving import Saver, Snapshot
from everstep.supervisor.trials import Trials
from everstep.supervisor.user_state import UserState


class Saves:
    """Decides at each boundary what becomes a checkpoint.

    The state of one step is copied once (a `Snapshot`); the newest copy stays in the kept buffers, and is
    committed when it is asked for, at once or later.

    Args:
        saver: writes what is committed.
        take: copies the whole state as it is now.
        check: runs the guard, and settles the writes before: either may taint the state.
        settle: notices what the writer has done; with True, waits for it first.

    Attributes:
        asked: whether a save is asked for at the next boundary.
    """

    def __init__(
        self,
        saver: Saver,
        progress: Progress,
        recovered: Recovered,
        user: UserState,
        trials: Trials,
        take: Callable[[CheckpointName, Phase], Snapshot],
        check: Callable[[], None],
        settle: Callable[[bool], None],
    ) -> None:
        self._saver, self._progress, self._recovered = saver, progress, recovered
        self._user, self._trials = user, trials
        self._take, self._check, self._settle = take, check, settle
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
        return self._recovered.step if self._snapshot is None else self._snapshot.name.step

    def one_before(self) -> bool:
        """Whether the newest copy is from one step before the last complete step.

        After a step loop of one step, a copy from one step before the end of the loop before it counts as
        well: there is no other state between the two, and both steps run again.
        """
        current = self._progress
        behind = current.step - self.step
        return behind == 1 or (behind == 2 and current.call_start == current.step - 1)

    def save_first(self) -> None:
        """Begin the checkpoint of step 0; the first boundary waits for it."""
        self._first_open = True
        self.save([(None, Save())], "epoch")

    def save(
        self,
        actions: Sequence[tuple[Service | None, Action]],
        phase: Phase,
        *,
        last: bool = False,
        interim: bool = True,
    ) -> None:
        """Copy the state once for all that asked for a save here.

        Args:
            last: whether the step loop's last step is complete.  A resume from after it would enter the
                loop and run no step: names that the program assigns in the loop and uses in the epoch's
                tail would not exist.  So the copy of one step before is committed instead, if there is
                one, and the last step runs again.
            interim: whether the copy of one step before only stands in until the epoch's end.
        """
        best = [action for _, action in actions if isinstance(action, SaveBest)]
        whole = any(isinstance(action, Save) for _, action in actions)
        if not (best or whole) or not self._is_good():
            return
        if self._progress.step > self._recovered.step:
            # a trial needs a state that a step has changed
            self._trials.try_state()
        last = last and self.one_before()
        if last:
            self.commit_kept(interim=interim)
        self.asked = last and (whole or self.asked)  # then at the epoch's end
        whole = whole and not last
        if not (best or whole):
            return
        name = self._name(phase)
        for service, action in actions:
            if isinstance(service, Best) and isinstance(action, SaveBest):
                # before the copy, whose manifest names the best weights
                service.keep_as(str(name), name.step)
        self._snapshot = self._take(name, phase)
        self._saver.commit(self._snapshot, best, whole=whole)
        self._kept_only = not (whole or last)

    def keep(self, phase: Phase) -> None:
        """Copy the current state, to be committed if an interruption comes before the next boundary."""
        name = self._name(phase)
        if self._snapshot is not None and self._snapshot.name == name:
            return
        # the state at the resume point is on disk already
        if self._recovered.checkpoint == str(name):
            return
        self.await_first()
        if not self._is_good():
            return
        try:
            self._snapshot = self._take(name, phase)
            self._kept_only = True
        except NotResumableError:
            self._snapshot = None  # an error only where a save is really asked for

    def commit_kept(self, *, interim: bool = False) -> None:
        """Commit the newest copy, unless it is committed already.

        Args:
            interim: whether the copy was not asked for, and only stands in until the epoch's end.
        """
        if self._kept_only and self._snapshot is not None and not self._user.tainted:
            self._snapshot.meta["interim"] = interim
            self._saver.commit(self._snapshot)
            self._kept_only = False

    def reserve(self) -> None:
        """Reserve buffers after the first update, for optimizers' moments: no save must stall for them."""
        if not self._reserved and self._user.updates and not self._saver.busy:
            self._reserved = True
            self._saver.reserve(self._user.arrays())

    def await_first(self) -> None:
        """Wait for the checkpoint of step 0: no row reaches the journal before it.

        Raises:
            CheckpointError: the save failed.
        """
        if self._first_open:
            self._settle(True)
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
        self._settle(True)
        error = self._saver.error
        if error is not None:
            raise CheckpointError(
                f"the last state could not be saved: {error}; {self._saver.remedy} and start again: "
                "the run goes on from the checkpoint before"
            ) from error

    def _is_good(self) -> bool:
        """Whether the state may be saved; the kept buffers are free once that is known."""
        # first: the guard, or an earlier write, may find that the state is bad
        self._check()
        return not self._user.tainted

    def _name(self, phase: Phase) -> CheckpointName:
        current = self._progress
        return CheckpointName(current.step, current.epoch if phase == "epoch" else None)
