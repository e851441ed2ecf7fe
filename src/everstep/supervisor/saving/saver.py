"""Saver: which boundaries become checkpoints, the copies of their state, and when a copy is committed."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from everstep import backends
from everstep.checkpoint import CheckpointName, CommittedCheckpoint, Phase, Writer, first_error
from everstep.contracts.services import Action, Moment, Save, SaveBest, Service
from everstep.durable import remedy
from everstep.errors import (
    CheckpointError,
    DivergedRanksError,
    NonFiniteError,
    NotResumableError,
    RunDirError,
)
from everstep.services.best import Best
from everstep.state import Buffers, Encoded, encode, split
from everstep.supervisor.saving.replicas import difference, leaf_digests
from everstep.supervisor.saving.spill import Spill
from everstep.supervisor.saving.writing import Snapshot, Writing, take_snapshot

if TYPE_CHECKING:
    from everstep.supervisor.engine import Engine


class Saver:
    """Decides at each boundary what becomes a checkpoint; owns the kept buffers and the writer thread.

    The state of one step is copied once (a `Snapshot`); the newest copy stays in the kept buffers, and is
    committed when it is asked for, at once or later.  What the writer thread does is `Writing`'s.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        rule = engine.settings.checkpoints
        self.writing = Writing(engine.opening, rule.retention)
        self._buffers = Buffers(rule.copy)
        self._spill = Spill(engine.opening.run_dir.path)
        self._writer = Writer(engine.voice.warn)
        self.asked = False
        """Whether a save is asked for at the next boundary."""
        self.last: CommittedCheckpoint | None = None
        """The newest commit of this process."""
        self.failures = 0
        self.error: OSError | MemoryError | None = None
        """The error of the newest save; None after a save that succeeded."""
        self._written: deque[CommittedCheckpoint] = deque()
        """Commits that are not announced; the writer thread appends."""
        self._in_doubt: list[tuple[str, str, float]] = []
        """Metric, name and value of best weights whose save has failed, with or after them."""
        self._first_open = False
        """Whether the checkpoint of step 0, the trial save, may still be uncommitted."""
        self._snapshot: Snapshot | None = None
        """The newest copy, taken at a boundary or where an epoch's steps ended."""
        self._kept_only = False
        """Whether the newest copy was not handed to the writer."""

    @property
    def step(self) -> int:
        """The step of the newest copy, committed or kept."""
        return self._engine.recovered.step if self._snapshot is None else self._snapshot.name.step

    def one_before(self) -> bool:
        """Whether the newest copy is of one step before the last complete step.

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
        best = [action for _, action in actions if isinstance(action, SaveBest)]
        whole = any(isinstance(action, Save) for _, action in actions)
        if not (best or whole) or not self._is_good():
            return
        self._forget_lost_best()
        left = engine.loop.steps_left() if phase == "step" else None
        last = left is not None and left < 1 and self.one_before()
        if last:
            # an interruption leaves here; otherwise the copy is only used until the epoch's end
            self.commit_kept(interim=engine.decisions.interruption is None)
        self.asked = last and (whole or self.asked)  # then at the epoch's end
        whole = whole and not last
        if not (best or whole):
            return
        name = self._name(phase)
        for service, action in actions:
            if isinstance(service, Best) and isinstance(action, SaveBest):
                # before the copy, whose manifest names the best weights
                service.keep_as(str(name), name.step)
        self._snapshot = self._copied(name, phase, best)
        if self._snapshot is None:
            return
        self._commit(self._snapshot, best, whole=whole)
        self._kept_only = not (whole or last)
        if self._kept_only and not self._buffers.copy:
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
            copy: Snapshot | NotResumableError | None = self._copied(name, phase)
        except NotResumableError as error:
            copy = error  # raised only where a save is really asked for
        self._snapshot, self._kept_only = None if copy is None else self._lasting(copy), True

    def commit_kept(self, *, interim: bool = False) -> None:
        """Commit the newest copy, if it is not; `interim`: it is only used until the epoch's end is saved."""
        if self._kept_only and self._snapshot is not None and not self._engine.user.tainted:
            self._snapshot.meta["interim"] = interim
            self._commit(self._snapshot)
            self._kept_only = False

    def _is_good(self) -> bool:
        """Whether the state may be saved; the kept buffers are free once that is known."""
        # first: the guard, or an earlier write, may find that the state is bad
        engine = self._engine
        # at most boundaries the guards have run before, and nothing was collected since
        guards = [s for s in engine.board if s.guards_saves and engine.board.reader(s).names()]
        engine.decisions.apply(engine.board.run(guards, engine.announcer.view(Moment.AFTER_STEP)))
        self.announce_commits(wait=True)
        return not engine.user.tainted

    def _name(self, phase: Phase) -> CheckpointName:
        current = self._engine.progress
        return CheckpointName(current.step, current.epoch if phase == "epoch" else None)

    def encode(self, tree: dict[str, Any]) -> Encoded:
        """Copy a tree into the kept buffers, once the running write no longer needs them.

        Without copies the arrays are the live ones: valid until training continues.
        """
        self._writer.wait()
        return encode(tree, self._buffers)

    def copied(self, tree: dict[str, Any]) -> Encoded:
        """Copy a tree into memory of its own; without copies in memory, onto the disk."""
        if self._buffers.copy:
            return encode(tree)
        try:
            return self._spill.keep(self.encode(tree))
        except OSError as error:
            raise RunDirError(
                error.errno,
                f"the state cannot be kept on disk, as Checkpoints(copy=False) does: {error.strerror}; "
                f"{remedy(error)} and start again",
                str(self._engine.opening.run_dir.path),
            ) from error

    def _copied(self, name: CheckpointName, phase: Phase, best: Sequence[SaveBest] = ()) -> Snapshot | None:
        """Copy the current state; None if there is no memory for the copy, which is a failed save.

        Several ranks end instead: one that has no copy may not leave the others to a save without it.
        """
        try:
            return take_snapshot(self._engine, name, phase)
        except MemoryError as error:
            if self._engine.ranks.several:
                raise
            self._failed(error, str(name), best)
            return None

    def _lasting(self, snapshot: Snapshot | NotResumableError) -> Snapshot | None:
        """Return a snapshot that stays valid while training continues; None where a rank has none.

        All ranks call this at the same boundary, also one that has only the reason why it has no snapshot:
        where one has no copy, none has, as all save alike later.
        """
        if self._buffers.copy:
            return snapshot if isinstance(snapshot, Snapshot) else None
        kept: Snapshot | Exception = snapshot
        if isinstance(snapshot, Snapshot):
            spilled: list[Encoded | OSError | MemoryError] = []
            self._writer.submit(lambda: self._spill.keep(snapshot.encoded), spilled.append, spilled.append)
            self._writer.wait()
            on_disk = spilled[0]
            kept = replace(snapshot, encoded=on_disk) if isinstance(on_disk, Encoded) else on_disk
        group = self._engine.ranks.group
        error = first_error(group, kept if isinstance(kept, Exception) else None, "the copy on disk")
        if error is None and isinstance(kept, Snapshot):
            return kept
        self._spill.close()
        if isinstance(error, OSError | MemoryError):
            self._failed(error)
        return None

    def tidy(self) -> None:
        """Let the writer thread tidy up after earlier starts, before it saves anything."""
        if self._engine.ranks.writer:
            self._writer.submit(self.writing.tidy, lambda _: None)

    def _commit(self, snapshot: Snapshot, best: Sequence[SaveBest] = (), *, whole: bool = True) -> None:
        """Start writing: the best weights, then, if `whole`, the checkpoint; without copies wait for it."""
        engine = self._engine
        if engine.settings.replay is not None:
            return

        def write() -> CommittedCheckpoint | None:
            return engine.retries.in_place(
                f"the save of {snapshot.name}", lambda: self.writing.write(snapshot, best, whole)
            )

        if not self._buffers.copy:
            for backend in backends.active():
                # the writer thread reads what a device may still be computing
                backend.synchronize()
        self._writer.submit(write, self._done, lambda error: self._failed(error, str(snapshot.name), best))
        if not self._buffers.copy:
            self._writer.wait_idle()

    def _done(self, committed: CommittedCheckpoint | None) -> None:
        self.error = None
        if committed is not None:
            self.last = committed
            self._written.append(committed)
        self._engine.wakeups.wish()

    def _failed(self, error: OSError | MemoryError, name: str = "", best: Sequence[SaveBest] = ()) -> None:
        """Count a failed save, and warn; training goes on."""
        run_dir = self._engine.opening.run_dir.path
        if not run_dir.is_dir():
            error = RunDirError(
                errno.ENOENT,
                "the run directory is gone: bring back what was deleted, moved or unmounted",
                str(run_dir),
            )
        self.failures += 1
        self.error = error
        reason = f"({type(error).__name__}: {error}); {remedy(error)}"
        if isinstance(error, RunDirError):
            reason = f"({error})"  # which says what to do
        self._engine.voice.warn(f"a save failed, and the previous checkpoint is intact {reason}")
        self._in_doubt += [(action.metric, name, action.value) for action in best]

    @property
    def _remedy(self) -> str:
        """Remedy for the error of the newest save, in words."""
        return "do so" if isinstance(self.error, RunDirError) else remedy(self.error)

    @property
    def job(self) -> int | None:
        """Number of the writer thread's job; None while it has nothing to do."""
        return self._writer.job

    def await_first(self) -> None:
        """Wait for the checkpoint of step 0: no row reaches the journal before it."""
        if self._first_open:
            self.announce_commits(wait=True)
            if self.error is not None:
                raise CheckpointError(
                    f"the trial save at step 0 failed: {self.error}; {self._remedy}, or choose another run "
                    "directory, before training"
                ) from self.error
            self._first_open = False

    def await_commit(self) -> None:
        """Wait until the writer has committed what it was given."""
        self.announce_commits(wait=True)
        if self.error is not None:
            raise CheckpointError(
                f"the last state could not be saved: {self.error}; {self._remedy} and start again: the run "
                "continues from the previous checkpoint"
            ) from self.error

    def announce_commits(self, *, wait: bool = False) -> None:
        """Announce the new commits of the writer thread, in the journal and to observers."""
        engine = self._engine
        try:
            if wait:
                self._writer.wait_idle()
            self._writer.poll()
        except NonFiniteError as error:
            # found in the bytes to be committed: the guard decides, as for a value of a step
            guard = next(service for service in engine.board if service.guards_state)
            actions = guard.bad_state(str(error), error.step).actions
            engine.decisions.apply([(guard, action) for action in actions])
        except DivergedRanksError as error:
            raise self._difference(error) from None
        for _ in range(len(self._written)):  # counted once: the writer thread may append meanwhile
            committed = self._written.popleft()
            name = str(committed.name)
            engine.verifier.committed(committed.name.step)
            engine.journal.event("checkpoint", {"name": name, "bytes": committed.bytes}, wall=True)
            engine.announcer.fire(Moment.AFTER_CHECKPOINT, name)

    def _forget_lost_best(self) -> None:
        """Name no best weights that a failed save has not kept; no later save has them."""
        engine = self._engine
        tried, self._in_doubt = self._in_doubt, []
        if not tried:
            return
        kept = engine.opening.store.has_best
        lost = [[metric, name] for metric, name, value in tried if not kept(metric, name, value)]
        # the writer's view: what it deletes depends on these names, and all ranks must ask for the same
        for metric, name in engine.ranks.group.share(lost, "best weights of a failed save"):
            for service in engine.board.bests:
                if service.metric == metric:
                    service.not_kept(name)
            engine.voice.warn(
                f"the weights of the best {metric} in {name} are not kept, as their save has failed"
            )

    def _difference(self, error: DivergedRanksError) -> Exception:
        """Find the first leaf that differs; every rank has failed that save, and calls this."""
        snapshot, group = self._snapshot, self._engine.ranks.group
        # a rank that leaves alone finds nobody to compare with
        if snapshot is None or group.failure() is not None:
            return error
        common, own = split(snapshot.encoded, snapshot.own)
        mine = leaf_digests(common, error.name, own, group.data.together(group.rank))
        return difference(error.name, group.gather(mine, "a state that differs"))

    def close(self) -> None:
        """Wait for the running write, and end the writer thread."""
        try:
            self._writer.close()
        finally:
            self._spill.close()
