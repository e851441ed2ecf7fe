"""Saves: which boundaries become checkpoints, copies of the state, and their writing on the writer thread."""

from __future__ import annotations

import errno
import math
import os
import secrets
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from everstep import backends, hazard
from everstep.checkpoint import (
    CheckpointName,
    CommittedCheckpoint,
    Draft,
    Exchange,
    Phase,
    Retention,
    disk_failed,
    first_error,
    is_interim,
    save_apart,
)
from everstep.contracts.services import Action, Moment, Save, SaveBest, Service
from everstep.contracts.state import HostArray, LazyArray
from everstep.durable import no_disk_error, remedy
from everstep.errors import CheckpointError, DivergedRanksError, NonFiniteError, RunDirError, UsageError
from everstep.record import Position
from everstep.services.best import Best
from everstep.state import (
    Buffers,
    Encoded,
    capture,
    content_digest,
    digest,
    encode,
    note_digests,
    split,
    with_regions,
)
from everstep.supervisor.opening.open_run import OpenRun
from everstep.supervisor.saving.rank_parts import difference, digests, leaf_digests, own_paths
from everstep.supervisor.saving.state_tree import random_parts

if TYPE_CHECKING:
    from everstep.supervisor.engine import Engine

T = TypeVar("T")
_Failed = Callable[[OSError | MemoryError], None]


class Saver:
    """Decides at each boundary what becomes a checkpoint; owns the kept buffers and the writer thread.

    The newest copy of a state (a `Snapshot`) stays in the buffers, and is committed at once or later.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        rule = engine.settings.checkpoints
        self.save_jobs = SaveJobs(engine.opening, rule.retention)
        self._buffers = Buffers(rule.copy)
        self._spill = Spill(engine.opening.run_dir.path)
        self._writer = WriterThread(engine.voice.warn)
        self.save_due = False
        """Whether a save is asked for at the next boundary."""
        self.last_commit: CommittedCheckpoint | None = None
        """The newest commit of this process."""
        self.failures = 0
        self.error: OSError | MemoryError | None = None
        """The error of the newest save; None after a save that succeeded."""
        self._unannounced: deque[CommittedCheckpoint] = deque()
        """Commits of the writer thread, which appends."""
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
        snapshot = self._snapshot
        return self._engine.recovered.step if snapshot is None else snapshot.draft.name.step

    def one_before(self) -> bool:
        """Whether the newest copy is of one step before; where the step loop had one step, of two."""
        current = self._engine.progress
        behind = current.step - self.step
        return behind == 1 or (behind == 2 and current.call_start == current.step - 1)

    def save_first(self) -> None:
        """Begin the checkpoint of step 0; the first boundary waits for it."""
        self._first_open = True
        self.save([(None, Save())], "epoch")

    def save(self, actions: Sequence[tuple[Service | None, Action]], phase: Phase) -> None:
        """Copy the state once for all that asked for a save here.

        After the last step of a step loop the copy of one step before is committed instead, so that the last
        step runs again at a resume ("The end of an epoch" in docs/design.md).
        """
        engine = self._engine
        best = [action for _, action in actions if isinstance(action, SaveBest)]
        with_checkpoint = any(isinstance(action, Save) for _, action in actions)
        if not (best or with_checkpoint) or not self._is_good():
            return
        self._forget_lost_best()
        remaining_steps = engine.loop.remaining_steps() if phase == "step" else None
        is_last = remaining_steps is not None and remaining_steps < 1 and self.one_before()
        if is_last:
            # an interruption leaves here; otherwise the copy is only used until the epoch's end
            self.commit_kept(interim=engine.decisions.interruption is None)
        self.save_due = is_last and (with_checkpoint or self.save_due)  # then at the epoch's end
        with_checkpoint = with_checkpoint and not is_last
        if not (best or with_checkpoint):
            return
        name = self._name(phase)
        for service, action in actions:
            if isinstance(service, Best) and isinstance(action, SaveBest):
                # before the copy, whose manifest names the best weights
                service.keep_as(str(name), name.step)
        self._snapshot = self._try_snapshot(name, phase, best)
        if self._snapshot is None:
            return
        self._start_commit(self._snapshot, best, with_checkpoint=with_checkpoint)
        self._kept_only = not (with_checkpoint or is_last)
        if self._kept_only and not self._buffers.copy:
            # the live arrays will not be these any more
            self._snapshot, self._kept_only = None, False

    def keep(self, phase: Phase) -> None:
        """Copy the current state, to be committed if an interruption comes before the next boundary."""
        name = self._name(phase)
        if self._snapshot is not None and self._snapshot.draft.name == name:
            return
        # the state at the resume point is on disk already
        if self._engine.recovered.checkpoint == str(name):
            return
        self.await_first()
        if not self._is_good():
            return
        self._forget_lost_best()
        snapshot = self._try_snapshot(name, phase)
        self._snapshot, self._kept_only = None if snapshot is None else self._lasting(snapshot), True

    def commit_kept(self, *, interim: bool = False) -> None:
        """Commit the newest copy, if it is not; `interim`: it is only used until the epoch's end is saved."""
        if self._kept_only and self._snapshot is not None and not self._engine.user.tainted:
            meta: Any = self._snapshot.draft.meta
            meta["interim"] = interim
            self._start_commit(self._snapshot)
            self._kept_only = False

    def _is_good(self) -> bool:
        """Whether the state may be saved; the kept buffers are free once that is known."""
        # first: the guard, or an earlier write, may find that the state is bad
        engine = self._engine
        # at most boundaries the guards have run before, and nothing was collected since
        guards = [s for s in engine.board if s.guards_saves and engine.board.reader(s).names()]
        engine.decisions.apply(engine.board.run(guards, engine.board.view(Moment.AFTER_STEP)))
        self.announce_commits(wait=True)
        return not engine.user.tainted

    def _name(self, phase: Phase) -> CheckpointName:
        current = self._engine.progress
        return CheckpointName(current.step, current.epoch if phase == "epoch" else None)

    def encode(self, tree: dict[str, Any]) -> Encoded:
        """Copy a tree into the kept buffers; without copies the arrays are the live ones."""
        self._writer.wait()
        return encode(tree, self._buffers)

    def encode_apart(self, tree: dict[str, Any]) -> Encoded:
        """Copy a tree into memory of its own; without copies in memory, onto the disk."""
        if self._buffers.copy:
            return encode(tree)
        what = "the state cannot be kept on disk, as Checkpoints(copy=False) does"
        with no_disk_error(what, self._engine.opening.run_dir.path):
            return self._spill.keep(self.encode(tree))

    def _try_snapshot(
        self, name: CheckpointName, phase: Phase, best: Sequence[SaveBest] = ()
    ) -> Snapshot | None:
        """Copy the current state; None if there is no memory for the copy, which is a failed save."""
        try:
            return take_snapshot(self._engine, name, phase)
        except MemoryError as error:
            if self._engine.ranks.several:  # the others would save without this rank
                raise
            self._on_error(error, str(name), best)
            return None

    def _lasting(self, snapshot: Snapshot) -> Snapshot | None:
        """Return a snapshot that lasts while training continues; None, on all ranks, where one has none."""
        if self._buffers.copy:
            return snapshot
        outcome: list[Encoded | OSError | MemoryError] = []
        tree, group = snapshot.draft.common, self._engine.ranks.group
        self._writer.submit(lambda: self._spill.keep(tree), outcome.append, outcome.append)
        self._writer.wait()
        on_disk = outcome[0]
        error = first_error(group, None if isinstance(on_disk, Encoded) else on_disk, "the copy on disk")
        if error is None and isinstance(on_disk, Encoded):
            return replace(snapshot, draft=replace(snapshot.draft, common=on_disk))
        self._spill.close()
        if isinstance(error, OSError | MemoryError):
            self._on_error(error)
        return None

    def tidy(self) -> None:
        """Let the writer thread tidy up after earlier starts, before it saves anything."""
        if self._engine.ranks.group.writer:
            self._writer.submit(self.save_jobs.tidy, lambda _: None)

    def _start_commit(
        self, snapshot: Snapshot, best: Sequence[SaveBest] = (), *, with_checkpoint: bool = True
    ) -> None:
        """Start writing: the best weights, then perhaps the checkpoint; without copies wait for it."""
        engine = self._engine
        if engine.settings.replay is not None:
            return

        name = str(snapshot.draft.name)

        def write() -> CommittedCheckpoint | None:
            return engine.retries.retry_in_place(
                f"the save of {name}", lambda: self.save_jobs.write(snapshot, best, with_checkpoint)
            )

        if not self._buffers.copy:
            for backend in backends.active():
                # the writer thread reads what a device may still be computing
                backend.synchronize()
        self._writer.submit(write, self._on_commit, lambda error: self._on_error(error, name, best))
        if not self._buffers.copy:
            self._writer.wait_idle()

    def _on_commit(self, committed: CommittedCheckpoint | None) -> None:
        self.error = None
        if committed is not None:
            self.last_commit = committed
            self._unannounced.append(committed)
        self._engine.wakeups.wish()

    def _on_error(self, error: OSError | MemoryError, name: str = "", best: Sequence[SaveBest] = ()) -> None:
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
    def job(self) -> int | None:
        """Number of the writer thread's job; None while it has nothing to do."""
        return self._writer.job

    def await_first(self) -> None:
        """Wait for the checkpoint of step 0: no row reaches the journal before it."""
        if self._first_open:
            self.await_commit("the trial save at step 0 failed", ", or choose another run directory")
            self._first_open = False

    def await_commit(
        self,
        problem: str = "the last state could not be saved",
        advice: str = " and start again: the run continues from the previous checkpoint",
    ) -> None:
        """Wait until the writer has committed what it was given."""
        self.announce_commits(wait=True)
        if self.error is not None:
            cure = "do so" if isinstance(self.error, RunDirError) else remedy(self.error)
            raise CheckpointError(f"{problem}: {self.error}; {cure}{advice}") from self.error

    def announce_commits(self, *, wait: bool = False) -> None:
        """Announce the new commits of the writer thread, in the journal and to observers."""
        engine = self._engine
        try:
            if wait:
                self._writer.wait_idle()
            self._writer.poll()
        except NonFiniteError as error:
            # found in the bytes to be committed: the guard decides, as for a value of a step
            good = engine.recovered.step if self.last_commit is None else self.last_commit.name.step
            if engine.settings.recovery is not None and (error.step or 0) > good + 1:
                engine.voice.warn(
                    f"the weights went bad in one of the steps {good + 1} to {error.step}, no metric tells "
                    "which: the rollback may quarantine the wrong batches, and other ones after a stop in "
                    "between; collect the loss at each step (docs/guide/services.md)"
                )
            guard = next(service for service in engine.board if service.guards_state)
            actions = guard.bad_state(str(error), error.step).actions
            engine.decisions.apply([(guard, action) for action in actions])
        except DivergedRanksError as error:
            raise self._difference(error) from None
        for _ in range(len(self._unannounced)):  # counted once: the writer thread may append meanwhile
            committed = self._unannounced.popleft()
            name = str(committed.name)
            engine.verifier.committed(committed.name.step)
            engine.journal.event("checkpoint", {"name": name, "bytes": committed.bytes}, wall=True)
            engine.board.fire(Moment.AFTER_CHECKPOINT, name)

    def _forget_lost_best(self) -> None:
        """Name no best weights that a failed save has not kept; no later save has them."""
        engine = self._engine
        doubtful, self._in_doubt = self._in_doubt, []
        if not doubtful:
            return
        has_best = engine.opening.store.has_best
        lost = [[metric, name] for metric, name, value in doubtful if not has_best(metric, name, value)]
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
        common, own = split(snapshot.draft.common, snapshot.own)
        own_digests = leaf_digests(common, error.name, own, group.data.together(group.rank))
        return difference(error.name, group.gather(own_digests, "a state that differs"))

    def close(self) -> None:
        """Wait for the running write, and end the writer thread."""
        try:
            self._writer.close()
        finally:
            self._spill.close()


@dataclass(frozen=True)
class Snapshot:
    """Copy of the whole state at one boundary, in the saver's buffers until the next.

    Attributes:
        draft: has the whole tree as the common one, and no digest yet.
        own: paths of what is this rank's own; empty on one process.
        prove: tries, before the commit, what the state claims of live arrays; None: it claims nothing.
        position: end of the journal's rows that belong to this state.
    """

    draft: Draft
    own: frozenset[tuple[str, ...]]
    prove: Callable[[], None] | None
    position: Position


def take_snapshot(engine: Engine, name: CheckpointName, phase: Phase) -> Snapshot:
    """Copy the state of all parts of a run into the saver's buffers."""
    current, board, recovered = engine.progress, engine.board, engine.recovered
    rank, data = engine.ranks.group.rank, engine.ranks.group.data
    current.updates = engine.user.updates
    user = engine.user.save()
    for warning in (*engine.user.growth_warnings(user["user"]), *engine.user.sharing_warnings(user["user"])):
        engine.voice.warn(warning)
    # inside an epoch its head has run, and what it did to data that is not opened yet stays known
    streams, words = engine.streams.tree(head_may_follow=phase == "epoch" or current.epoch == 0)
    wall = {"segment": engine.segment, "seconds": engine.seconds(), **user.pop("wall")}
    if words:
        wall["streams"] = words
    if variables := engine.variables.saved():
        wall["variables"] = variables
    services = {**board.state(), "metrics": {"version": 1, "state": engine.collector.state()}}
    now_key, lines_key = random_parts(rank)
    tree = {
        "progress": current.tree(phase),
        **user,
        "streams": streams,
        "rng": {now_key: capture(), lines_key: engine.rng_marks.tree()},
        "services": services,
        "wall": wall,
    }
    own = frozenset[tuple[str, ...]]()
    if engine.ranks.several:
        own = own_paths(rank, engine.user.rank_paths(), engine.streams.rank_paths())
    encoded = engine.saver.encode(tree)
    # before the flush: its position is the end of the rows that belong to this state
    engine.verifier.snapshot(current.step, phase, encoded)
    position = engine.recording.flush()
    config = engine.settings.config
    values = engine.recording.last_values
    meta = {
        "run": engine.opening.run_dir.id,
        "controllers": board.controllers(),
        "options": engine.user.options(),
        "config": None if config is None else config.tree,
        "journal": list(position),
        "metrics": {n: v for n, v in values.items() if math.isfinite(v)},
        "metric_steps": dict(engine.recording.last_steps),
        "kept": {metric: list(names) for s in board for metric, names in s.best_to_keep().items()},
        "open": engine.boundaries.unfinished,
        "limits": {n: [engine.limits_given.get(n, now), now] for n, now in engine.limits.tree().items()},
        "rollbacks": [rollback.stored() for rollback in engine.rollbacks.decided],
        "fingerprint": recovered.fingerprint,
        "one_fingerprint": recovered.one_fingerprint,
        "data_ranks": None if data.in_order else list(data.of),
    }
    guards = any(service.guards_state for service in board)
    guarded = engine.user.guarded(user["user"], encoded.arrays) if guards else frozenset[str]()
    partial = phase == "epoch" and engine.loop.is_partial()
    draft = Draft(name, encoded, "", current.epoch, phase, partial, meta, guarded)
    return Snapshot(draft, own, engine.user.prove(), position)


class SaveJobs:
    """Jobs of the writer thread, one at a time; every rank writes its part of a checkpoint."""

    def __init__(self, opening: OpenRun, retention: Retention) -> None:
        self._opening, self._retention = opening, retention
        self._journal, group = opening.journal, opening.group
        self._together_with = group.data.together(group.rank)
        self._exchange = Exchange(group) if group.size > 1 else None
        self.digest: str | None = None
        """Digest of the newest committed state, that of an interim checkpoint included."""

    def write(
        self, snapshot: Snapshot, best: Sequence[SaveBest], with_checkpoint: bool
    ) -> CommittedCheckpoint | None:
        """Write a snapshot; return the commit that observers hear of, if there is one."""
        # before the checkpoint, which names them: a resume from it needs them on disk
        spread = any(array.region is not None for array in snapshot.draft.common.arrays.values())
        for action in best if spread else ():
            # each by itself, as all ranks have a part of them
            with self._together(snapshot):
                self._write_best(snapshot, action, spread)
        with self._together(snapshot):
            if self._opening.writer and not spread:
                for action in best:
                    self._write_best(snapshot, action, spread)
            committed = self._write_checkpoint(snapshot) if with_checkpoint else None
        if committed is None:
            return None
        self.digest = committed.digest
        if self._opening.writer:
            # only now: until the new checkpoint is durable, the older ones are what a resume has
            self._opening.mirror.retain_and_upload(self._journal.durable, self.retain)
        return None if is_interim(snapshot.draft.meta) else committed

    @contextmanager
    def _together(self, snapshot: Snapshot) -> Iterator[None]:
        """Make one save together with the other ranks; the writer requires that the run is its own."""
        with nullcontext() if self._exchange is None else self._exchange.save():
            if snapshot.prove is not None:
                snapshot.prove()
            if self._opening.writer:
                self._opening.lock.keep()
                self._opening.run_dir.require_newest(self._opening.segment)
                self._opening.mirror.require_held()
                # first: a later start continues from the newest checkpoint, and keeps the best it names
                self._opening.store.apply_choice()
            yield

    def tidy(self) -> None:
        """Delete interim checkpoints, and no others; set damaged best weights aside."""
        store = self._opening.store
        self._opening.mirror.retain_and_upload(0, lambda: self.retain(Retention(keep_last=None)))
        for problem in store.check_best():
            self._opening.voice.warn(problem)

    def retain(self, rule: Retention | None = None) -> None:
        """Delete what a rule (None: the run's) does not keep, while the writer thread does nothing else."""
        try:
            self._opening.store.retain(rule or self._retention, self._opening.mirror.needed)
        except (OSError, MemoryError) as error:
            if not disk_failed(error):
                raise  # a later start has the run
            # no failed save: the commit is done, and the other ranks know nothing of this
            reason = str(error) if isinstance(error, RunDirError) else f"{error}; {remedy(error)}"
            self._opening.voice.warn(f"checkpoints that no rule keeps could not be deleted ({reason})")

    def _write_checkpoint(self, snapshot: Snapshot) -> CommittedCheckpoint:
        # rows before their checkpoint: a power cut must not leave a checkpoint whose rows are missing
        self._journal.fsync_only(snapshot.position)
        tree = snapshot.draft.common
        common, own = split(tree, snapshot.own)
        # what is in common counts once: services that report have their state on the writer alone
        part = tree if self._opening.writer else with_regions(own, common)
        note_digests(part)
        exchange = self._exchange
        replicated = {} if exchange is None else digests(common, own, self._together_with)
        draft = replace(snapshot.draft, common=common, digest=digest(part), own=own, replicated=replicated)
        if exchange is not None and not exchange.leads:
            return exchange.write_part(self._opening.store.folder, draft)
        return self._opening.store.commit(draft, exchange)

    def _write_best(self, snapshot: Snapshot, action: SaveBest, spread: bool) -> None:
        structure: Any = snapshot.draft.common.structure
        arrays = snapshot.draft.common.arrays
        arrays = {name: array for name, array in arrays.items() if name.startswith("user/")}
        user = Encoded({"user": structure["user"]}, arrays)
        note_digests(user)
        store, exchange = self._opening.store, self._exchange
        folder = store.best_folder(action.metric)
        meta: Any = {"metric": action.metric, "value": action.value, "run": self._opening.run_dir.id}
        draft = replace(snapshot.draft, common=user, digest=digest(user), partial=False, meta=meta)
        if exchange is not None and not exchange.leads:
            exchange.write_part(folder, draft)
            return
        together: dict[str, Any] = {}
        if spread and exchange is not None:
            together = {"filler": exchange.filler, "token": secrets.token_hex(4)}
        # a resume from a checkpoint on disk needs the best weights that it names
        needed = {name for facts in store.facts() for name in facts.kept.get(action.metric, ())}
        keep, top = {*needed, *action.beside}, self._opening.run_dir.path
        save_apart(folder, draft, keep=keep, top=top, **together)


class WriterThread:
    """Runs jobs in the background, one at a time, each in a thread of its own.

    A disk error or lack of memory makes a *failed save*: the error goes to the job's `failed`, and training
    continues.  The next `poll`, `wait`, `submit` or `close` raises any other error in the caller's thread.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._count = 0
        """Number of jobs so far."""

    def submit(self, job: Callable[[], T], done: Callable[[T], None], failed: _Failed | None = None) -> None:
        """Run `job` after the running one; its thread calls `done` with the result, or `failed`."""
        if self._closed:
            raise UsageError("the writer is closed: submit before close()")
        self.wait()
        self._count += 1
        calls = (job, done, failed or self._say_failed)
        thread = threading.Thread(target=self._run, args=calls, name="everstep-writer", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system gives no more threads
            calls[2](MemoryError(str(error)))
        else:
            self._thread = thread

    def wait_idle(self) -> None:
        """Wait until no job runs; an unexpected error stays for `poll`."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Wait until no job runs, then `poll`."""
        self.wait_idle()
        self.poll()

    def poll(self) -> None:
        """Raise the unexpected error of a job once, if there is one; waits for nothing."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def job(self) -> int | None:
        """Number of the job that is running, from 1; None while none is."""
        return self._count if self._thread is not None and self._thread.is_alive() else None

    def close(self) -> None:
        """Let the running job end, then `poll`; may be called twice."""
        self._closed = True
        self.wait()

    def _run(self, job: Callable[[], Any], done: Callable[[Any], None], failed: _Failed) -> None:
        try:
            try:
                result = job()
            except (OSError, MemoryError) as error:
                if not disk_failed(error):
                    raise
                failed(error)
            else:  # outside the try: an error of `done` is a bug, not a failed save
                done(result)
        except BaseException as error:  # carried to the caller's thread
            self._error = error

    def _say_failed(self, error: OSError | MemoryError) -> None:
        self._say(f"a save failed, training continues ({type(error).__name__}: {error})")


class Spill:
    """Copy of a state in a file without a name, for a run that keeps none in memory (`copy=False`)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: FileIO | None = None

    def keep(self, encoded: Encoded) -> Encoded:
        """Write the arrays to disk; returns the same tree, with arrays that are read back one at a time.

        The tree that was kept before is gone.
        """
        self.close()
        self._file = file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
        return replace(encoded, arrays=dict(_write_arrays(file, encoded.arrays)))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _write_arrays(file: FileIO, arrays: Mapping[str, HostArray]) -> Iterator[tuple[str, HostArray]]:
    at = 0
    for name, array in arrays.items():
        digest = content_digest(array)
        hazard.reach("checkpoint.spill")
        rest = array.data.data
        while rest:
            rest = rest[file.write(rest) :]
        yield name, _array_on_disk(file, at, array, digest)
        at += array.nbytes


def _array_on_disk(file: FileIO, at: int, array: HostArray, digest: str) -> HostArray:
    size = array.nbytes

    def fetch() -> NDArray[np.uint8]:
        data = np.empty(size, np.uint8)
        end = 0
        while end < size and (count := os.preadv(file.fileno(), [data.data[end:]], at + end)):
            end += count
        if xxhash.xxh3_128_hexdigest(data.data) != digest:
            raise OSError(errno.EIO, "the state that was kept on disk has changed there")
        return data

    return LazyArray(array.dtype, array.shape, array.backend, array.extra, array.region, size, fetch, digest)
