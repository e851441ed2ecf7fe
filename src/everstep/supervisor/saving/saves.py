"""Saves: what is asked for at a boundary is copied on the main thread, and committed by the writer thread."""

from __future__ import annotations

import errno
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from everstep.checkpoint import (
    CheckpointName,
    CommittedCheckpoint,
    Phase,
    RankExchange,
    RankStore,
    Retention,
    Writer,
    WriterExchange,
    save_apart,
)
from everstep.contracts.group import Group
from everstep.contracts.services import Action, Moment, Save, SaveBest, Service
from everstep.durable import remedy
from everstep.errors import (
    CheckpointError,
    DivergedRanksError,
    NonFiniteError,
    NotResumableError,
    RunDirError,
)
from everstep.record import Journal, Position
from everstep.services.best import Best
from everstep.services.nan_guard import NaNGuard
from everstep.state import Buffers, Encoded, digest, encode, split
from everstep.supervisor.leaving.retries import Retries
from everstep.supervisor.opening.run_opening import Opening
from everstep.supervisor.saving.rank_parts import own_paths
from everstep.supervisor.saving.replicas import difference, digests, leaf_digests
from everstep.supervisor.saving.state_tree import whole_tree
from everstep.supervisor.voice import Voice

if TYPE_CHECKING:
    from everstep.supervisor.engine import Engine


@dataclass(frozen=True)
class Snapshot:
    """Copy of the whole state at one boundary: training may continue meanwhile.

    Attributes:
        name: the name of the checkpoint to be.
        encoded: the tree; its arrays lie in the saver's kept buffers until the next snapshot.
        own: paths of what is this rank's own; empty on one process.
        guarded: names of the arrays that must be finite to be committed.
        phase, epoch, partial, meta: for the manifest.
        position: end of the journal's rows that belong to this state.
    """

    name: CheckpointName
    encoded: Encoded
    own: frozenset[tuple[str, ...]]
    guarded: frozenset[str]
    phase: Phase
    epoch: int
    partial: bool
    meta: dict[str, Any]
    position: Position

    @property
    def interim(self) -> bool:
        """Whether the checkpoint only replaces the later one at the epoch's end: observers are not told."""
        return bool(self.meta.get("interim"))


class Saver:
    """Owns the kept buffers and the writer thread.

    Args:
        opening: the run directory and its store.
        journal: made durable up to a snapshot's position before the snapshot is committed.
        retention: the rule that says which checkpoints stay.
        retries: repeat a save that a listed error has ended.
        wake: called from the writer thread when something ended; must only set plain attributes.
        voice: warns of a failed save.
        group: the ranks, each of which writes its part of a checkpoint.

    Attributes:
        last: the newest commit of this process, None before the first.
        digest: digest of the newest committed state, that of an interim checkpoint included.
        failures: number of failed saves.
        error: the error of the newest save; None after a save that succeeded.
    """

    def __init__(
        self,
        opening: Opening,
        journal: Journal,
        retention: Retention,
        retries: Retries,
        wake: Callable[[], None],
        voice: Voice,
        group: Group,
    ) -> None:
        self._exchange: WriterExchange | RankExchange | None = None
        if group.size > 1:
            self._exchange = WriterExchange(group) if group.writer else RankExchange(group)
        self._opening, self._journal, self._retention = opening, journal, retention
        self._retries, self._wake, self._voice = retries, wake, voice
        self._buffers = Buffers()
        self._writer = Writer(voice.warn)
        self._committed: deque[CommittedCheckpoint] = deque()  # the writer thread appends
        self.last: CommittedCheckpoint | None = None
        self.digest: str | None = None
        self.failures = 0
        self.error: OSError | MemoryError | None = None

    def encode(self, tree: dict[str, Any]) -> Encoded:
        """Copy a tree into the kept buffers, once the running write no longer needs them."""
        self._writer.wait()
        return encode(tree, self._buffers)

    def reserve(self, arrays: dict[str, Any]) -> None:
        """Let the writer thread make buffers for arrays that are new since the last snapshot."""
        self._writer.submit(lambda: self._buffers.reserve(arrays), lambda _: None)

    def tidy(self) -> None:
        """Let the writer thread tidy up after earlier starts, before it saves anything."""

        def see_to_it() -> list[str]:
            self._opening.store.retain(Retention(keep_last=None))
            return self._opening.store.check_best()

        def warn(problems: list[str]) -> None:
            for problem in problems:
                self._voice.warn(problem)

        if self._opening.writer:
            self._writer.submit(see_to_it, warn)

    def commit(self, snapshot: Snapshot, best: Sequence[SaveBest] = (), *, whole: bool = True) -> None:
        """Start writing: the best weights first, then, if `whole`, the checkpoint that names them."""
        what = f"the save of {snapshot.name}"

        def write() -> CommittedCheckpoint | None:
            return self._retries.in_place(what, lambda: self._write(snapshot, best, whole))

        self._writer.submit(write, self._done, self._failed)

    def _write(self, snapshot: Snapshot, best: Sequence[SaveBest], whole: bool) -> CommittedCheckpoint | None:
        with nullcontext() if self._exchange is None else self._exchange.save():
            if self._opening.writer:
                self._opening.lock.keep()
                self._opening.run_dir.require_newest(self._opening.segment)
                # first: a later start continues from the newest checkpoint, and keeps the best it names
                self._opening.store.settle()
                # before the checkpoint, which names them: a resume from it needs them on disk
                for action in best:
                    self._write_best(snapshot, action)
            committed = self._write_whole(snapshot) if whole else None
        if committed is None:
            return None
        self.digest = committed.digest
        if self._opening.writer:
            # only now: until the new checkpoint is durable, the older ones are what a resume has
            self._opening.store.retain(self._retention)
        return None if snapshot.interim else committed

    def _write_whole(self, snapshot: Snapshot) -> CommittedCheckpoint:
        # rows before their checkpoint: a power cut must not leave a checkpoint whose rows are missing
        self._journal.fsync_only(snapshot.position)
        name, (common, own) = snapshot.name, split(snapshot.encoded, snapshot.own)
        facts: dict[str, Any] = {
            # what is in common counts once: services that report have their state on the writer alone
            "digest": digest(snapshot.encoded if self._opening.writer else own),
            "epoch": snapshot.epoch,
            "phase": snapshot.phase,
            "partial": snapshot.partial,
            "meta": snapshot.meta,
            "guarded": snapshot.guarded,
        }
        exchange, store = self._exchange, self._opening.store
        if exchange is None:
            return store.commit(name, common.structure, common.arrays, **facts)
        facts |= {"own": own, "replicated": digests(common)}
        if isinstance(exchange, WriterExchange):
            return store.commit(name, common.structure, common.arrays, ranks=exchange, **facts)
        part = RankStore(self._opening.run_dir.path)
        return part.commit(name, common.structure, common.arrays, ranks=exchange, **facts)

    def _write_best(self, snapshot: Snapshot, action: SaveBest) -> None:
        structure: Any = snapshot.encoded.structure
        arrays = {name: a for name, a in snapshot.encoded.arrays.items() if name.startswith("user/")}
        user = Encoded({"user": structure["user"]}, arrays)
        save_apart(
            self._opening.store.best_folder(action.metric),
            snapshot.name,
            user.structure,
            user.arrays,
            digest=digest(user),
            epoch=snapshot.epoch,
            phase=snapshot.phase,
            meta={"metric": action.metric, "value": action.value, "run": self._opening.run_dir.id},
            guarded=snapshot.guarded,
            keep={*self._spoken_of(action.metric), *action.beside},
            top=self._opening.run_dir.path,
        )

    def _spoken_of(self, metric: str) -> set[str]:
        """Names of best weights in the checkpoints on disk: a resume from such a checkpoint needs its own."""
        return {name for facts in self._opening.store.facts() for name in facts.kept.get(metric, ())}

    def _done(self, committed: CommittedCheckpoint | None) -> None:
        self.error = None
        if committed is not None:
            self.last = committed
            self._committed.append(committed)
        self._wake()

    def _failed(self, error: OSError | MemoryError) -> None:
        run_dir = self._opening.run_dir.path
        if not run_dir.is_dir():
            error = RunDirError(
                errno.ENOENT,
                "the run directory is gone: bring back what was deleted, moved or unmounted",
                str(run_dir),
            )
        self.failures += 1
        self.error = error
        told = f"{type(error).__name__}: {error}"
        self._voice.warn(f"a save failed, and the previous checkpoint is intact ({told}); {self.remedy}")

    @property
    def remedy(self) -> str:
        """Remedy for the error of the newest save, in words."""
        return "do so" if isinstance(self.error, RunDirError) else remedy(self.error)

    def take_committed(self) -> list[CommittedCheckpoint]:
        """Take the commits that are not announced yet, oldest first."""
        # counted once: the writer thread may append meanwhile
        return [self._committed.popleft() for _ in range(len(self._committed))]

    @property
    def busy(self) -> bool:
        """Whether the writer thread is at work."""
        return self._writer.busy

    @property
    def job(self) -> int | None:
        """Number of the writer thread's job; None while it has nothing to do."""
        return self._writer.job

    def settle(self, *, wait: bool) -> None:
        """Raise the unexpected error of a write, if there is one; `wait` for the running write first."""
        if wait:
            self._writer.wait()
        else:
            self._writer.poll()

    def close(self) -> None:
        """Wait for the running write, and end the writer thread."""
        self._writer.close()


def take_snapshot(engine: Engine, name: CheckpointName, phase: Phase) -> Snapshot:
    """Copy the state of all parts of a run into the saver's buffers.

    The order matters: the verifier compares the copy before the rows are flushed, and the position that the
    flush returns is the end of the rows that belong to this state.
    """
    current, board, recovered = engine.progress, engine.board, engine.recovered
    current.updates = engine.user.updates
    user = engine.user.save()
    engine.trials.try_parts(user["user"])
    streams, words = engine.streams.tree()
    wall: dict[str, Any] = {"segment": engine.segment, "seconds": engine.seconds()}
    if words:
        wall["streams"] = words
    tree = whole_tree(
        progress=current.tree(phase),
        user=user,
        streams=streams,
        lines=engine.rng_marks.tree(),
        services=board.state(),
        metrics=engine.collector.state(),
        wall=wall,
        rank=engine.ranks.group.rank,
    )
    guard = board.find(NaNGuard)
    rank, own = engine.ranks.group.rank, frozenset[tuple[str, ...]]()
    if engine.ranks.several:
        own = own_paths(rank, engine.user.rank_paths(), engine.streams.rank_paths())
    encoded = engine.saver.encode(tree)
    engine.verifier.snapshot(current.step, phase, encoded)
    position = engine.recording.flush()
    config = engine.settings.start.config
    values = engine.recording.last_values
    meta = {
        "run": engine.opening.run_dir.id,
        "controllers": board.controllers(),
        "options": engine.user.options(),
        "config": None if config is None else config.tree,
        "journal": list(position),
        "metrics": {n: v for n, v in values.items() if math.isfinite(v)},
        "metric_steps": dict(engine.recording.last_steps),
        "best": {b.metric: b.saved_as for b in board.all(Best) if b.saved_as is not None},
        "kept": {b.metric: b.kept for b in board.all(Best) if b.kept},
        "open": engine.boundaries.left_open,
        "rollbacks": [rollback.stored() for rollback in engine.rollbacks.decided],
        "fingerprint": recovered.fingerprint,
        "one_fingerprint": recovered.one_fingerprint,
    }
    return Snapshot(
        name=name,
        encoded=encoded,
        own=own,
        guarded=engine.user.guarded(user["user"], encoded.arrays)
        if guard and guard.parameters
        else frozenset(),
        phase=phase,
        epoch=current.epoch,
        partial=phase == "epoch" and engine.loop.is_partial(),
        meta=meta,
        position=position,
    )


class Saves:
    """Decides at each boundary what becomes a checkpoint.

    The state of one step is copied once (a `Snapshot`); the newest copy stays in the kept buffers, and is
    committed when it is asked for, at once or later.

    Attributes:
        asked: whether a save is asked for at the next boundary.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._saver = engine, engine.saver
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
        best = [action for _, action in actions if isinstance(action, SaveBest)]
        whole = any(isinstance(action, Save) for _, action in actions)
        if not (best or whole) or not self._is_good():
            return
        if engine.progress.step > engine.recovered.step:
            # a trial needs a state that a step has changed
            engine.trials.try_state()
        left = engine.loop.steps_left() if phase == "step" else None
        last = left is not None and left < 1 and self.one_before()
        if last:
            # an interruption leaves here; otherwise the copy only stands in until the epoch's end
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
        self._snapshot = take_snapshot(self._engine, name, phase)
        self._saver.commit(self._snapshot, best, whole=whole)
        self._kept_only = not (whole or last)

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
        try:
            self._snapshot = take_snapshot(self._engine, name, phase)
            self._kept_only = True
        except NotResumableError:
            self._snapshot = None  # an error only where a save is really asked for

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
        for committed in self._saver.take_committed():
            name = str(committed.name)
            engine.verifier.committed(committed.name.step)
            engine.journal.event("checkpoint", {"name": name, "bytes": committed.bytes}, wall=True)
            engine.announcer.fire(Moment.AFTER_CHECKPOINT, name)

    def _difference(self, error: DivergedRanksError) -> Exception:
        """Find the first leaf that differs; every rank has failed that save, and calls this."""
        snapshot = self._snapshot
        if snapshot is None:
            return error
        common, _ = split(snapshot.encoded, snapshot.own)
        found = self._engine.ranks.group.gather(leaf_digests(common, error.name), "a state that differs")
        return difference(error.name, found)

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
