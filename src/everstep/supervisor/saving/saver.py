"""Saver: commits snapshots on the writer thread, from the kept buffers that it owns."""

from __future__ import annotations

import errno
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from shutil import disk_usage
from typing import Any

from everstep import backends
from everstep.checkpoint import (
    Commit,
    CommittedCheckpoint,
    RankExchange,
    RankStore,
    Retention,
    Writer,
    WriterExchange,
    disk_failed,
    first_error,
    save_apart,
)
from everstep.contracts.group import Group
from everstep.contracts.services import Clock, SaveBest
from everstep.durable import remedy
from everstep.errors import NotResumableError, RunDirError
from everstep.record import Journal
from everstep.services.checkpoints import Checkpoints
from everstep.state import Buffers, Encoded, digest, encode, note_digests, split, with_regions
from everstep.supervisor.leaving.retries import Retries
from everstep.supervisor.opening.run_opening import Opening
from everstep.supervisor.saving.memory_left import memory_left, too_large
from everstep.supervisor.saving.replicas import digests
from everstep.supervisor.saving.snapshot import Snapshot
from everstep.supervisor.saving.spill import Spill
from everstep.supervisor.voice import Voice


class Saver:
    """Owns the kept buffers and the writer thread.

    Args:
        opening: the run directory and its store.
        journal: made durable up to a snapshot's position before the snapshot is committed.
        rule: the service that says which checkpoints stay, and whether the state is copied.
        retries: repeat a save that a listed error has ended.
        wake: called from the writer thread when something ended; must only set plain attributes.
        clock: monotonic seconds.
        voice: warns of a failed save.
        group: the ranks, each of which writes its part of a checkpoint.
        commits: whether saves are written; False in a replay.

    Attributes:
        last: the newest commit of this process, None before the first.
        digest: digest of the newest committed state, that of an interim checkpoint included.
        written: clock time at which the newest commit was on the disk.
        failures: number of failed saves.
        error: the error of the newest save; None after a save that succeeded.
        in_doubt: metric, name and value of best weights whose save has failed, with or after them.
    """

    def __init__(
        self,
        opening: Opening,
        journal: Journal,
        rule: Checkpoints,
        retries: Retries,
        wake: Callable[[], None],
        clock: Clock,
        voice: Voice,
        group: Group,
        *,
        commits: bool = True,
    ) -> None:
        self._group = group
        self._exchange: WriterExchange | RankExchange | None = None
        if group.size > 1:
            self._exchange = WriterExchange(group) if group.writer else RankExchange(group)
        self._together_with = group.data.together(group.rank)
        self._part = RankStore(opening.run_dir.path)
        self._opening, self._journal, self._retention = opening, journal, rule.retention
        self._retries, self._wake, self._clock, self._voice = retries, wake, clock, voice
        self._buffers = Buffers(rule.copy)
        self._spill = Spill(opening.run_dir.path)
        self._writer = Writer(voice.warn)
        self._committed: deque[CommittedCheckpoint] = deque()  # the writer thread appends
        self._commits = commits
        self.last: CommittedCheckpoint | None = None
        self.digest: str | None = None
        self.written = 0.0
        self.failures = 0
        self.error: OSError | MemoryError | None = None
        self.in_doubt: list[tuple[str, str, float]] = []

    @property
    def copies(self) -> bool:
        """Whether a snapshot is a copy, and not the live arrays."""
        return self._buffers.copy

    def encode(self, tree: dict[str, Any]) -> Encoded:
        """Copy a tree into the kept buffers, once the running write no longer needs them.

        Without copies the arrays are the live ones: valid until training continues.
        """
        self._writer.wait()
        return encode(tree, self._buffers)

    def copied(self, tree: dict[str, Any]) -> Encoded:
        """Copy a tree into memory of its own; without copies in memory, onto the disk.

        Raises:
            RunDirError: the disk failed.
        """
        if self.copies:
            return encode(tree)
        try:
            return self._spill.keep(self.encode(tree))
        except OSError as error:
            raise RunDirError(
                error.errno,
                f"the state cannot be kept on disk, as Checkpoints(copy=False) does: {error.strerror}; "
                f"{remedy(error)} and start again",
                str(self._opening.run_dir.path),
            ) from error

    def kept(self, snapshot: Snapshot | NotResumableError) -> Snapshot | None:
        """Return a snapshot that stays valid while training continues; None where a rank has none.

        All ranks call this at the same boundary: where one has no copy, none has, as all save alike later.

        Args:
            snapshot: the snapshot; or why there is none, which the other ranks hear where they wait.
        """
        if self.copies:
            return snapshot if isinstance(snapshot, Snapshot) else None
        kept = self._on_disk(snapshot) if isinstance(snapshot, Snapshot) else snapshot
        error = first_error(self._group, kept if isinstance(kept, Exception) else None, "the copy on disk")
        if error is None and isinstance(kept, Snapshot):
            return kept
        self._spill.close()
        if isinstance(error, OSError | MemoryError):
            self.failed(error)
        return None

    def _on_disk(self, snapshot: Snapshot) -> Snapshot | OSError | MemoryError:
        """Return a snapshot with its arrays on the disk, or the error of the disk."""
        found: list[Encoded | OSError | MemoryError] = []
        self._writer.submit(lambda: self._spill.keep(snapshot.encoded), found.append, found.append)
        self._writer.wait()
        kept = found[0]
        return replace(snapshot, encoded=kept) if isinstance(kept, Encoded) else kept

    def reserve(self, arrays: dict[str, Any]) -> None:
        """Let the writer thread make buffers for arrays that are new since the last snapshot.

        Where these will not fit into the memory that is left, none are made, and the user is told.
        """
        if not self.copies:
            return
        new = [array for name, array in arrays.items() if name not in self._buffers.kept]
        if told := too_large(sum(map(_size, new)), memory_left()):
            self._voice.warn(told)
        else:
            self._writer.submit(lambda: self._buffers.reserve(arrays), lambda _: None)

    def tidy(self) -> None:
        """Let the writer thread tidy up after earlier starts, before it saves anything."""

        def see_to_it() -> list[str]:
            store, mirror = self._opening.store, self._opening.mirror
            mirror.committed(0, lambda: self._retain(Retention(keep_last=None)))
            return [*store.best_weights.check(), *store.check_shared()]

        def warn(problems: list[str]) -> None:
            for problem in problems:
                self._voice.warn(problem)

        if self._opening.writer:
            self._writer.submit(see_to_it, warn)

    def commit(self, snapshot: Snapshot, best: Sequence[SaveBest] = (), *, whole: bool = True) -> None:
        """Start writing: the best weights first, then, if `whole`, the checkpoint that names them.

        Without copies this waits until all is written, and errors come out later, as they do with copies.
        """
        if not self._commits:
            return
        what = f"the save of {snapshot.name}"

        def write() -> CommittedCheckpoint | None:
            return self._retries.in_place(what, lambda: self._write(snapshot, best, whole))

        if not self.copies:
            for backend in backends.active():
                # the writer thread reads what a device may still be computing
                backend.synchronize()
        self._writer.submit(write, self._done, lambda error: self.failed(error, str(snapshot.name), best))
        if not self.copies:
            self._writer.wait_idle()

    def _write(self, snapshot: Snapshot, best: Sequence[SaveBest], whole: bool) -> CommittedCheckpoint | None:
        # before the checkpoint, which names them: a resume from it needs them on disk
        spread = any(array.region is not None for array in snapshot.encoded.arrays.values())
        for action in best if spread else ():
            # each by itself, as all ranks have a part of them
            with self._together(snapshot):
                self._write_best(snapshot, action, spread)
        with self._together(snapshot):
            if self._opening.writer and not spread:
                for action in best:
                    self._write_best(snapshot, action, spread)
            committed = self._write_whole(snapshot) if whole else None
        if committed is None:
            return None
        self.digest = committed.digest
        if self._opening.writer:
            # only now: until the new checkpoint is durable, the older ones are what a resume has
            self._opening.mirror.committed(self._journal.durable, self.retain)
        return None if snapshot.interim else committed

    @contextmanager
    def _together(self, snapshot: Snapshot) -> Iterator[None]:
        """Make one save together with the other ranks; the writer sees to it that the run is its own."""
        with nullcontext() if self._exchange is None else self._exchange.save():
            if snapshot.prove is not None:
                snapshot.prove()
            if self._opening.writer:
                self._opening.lock.keep()
                self._opening.run_dir.require_newest(self._opening.segment)
                self._opening.mirror.require_held()
                # first: a later start continues from the newest checkpoint, and keeps the best it names
                self._opening.store.settle()
            yield

    def retain(self) -> None:
        """Delete what the rule does not keep, on the writer thread or while it has nothing to do."""
        self._retain(self._retention)

    def _retain(self, policy: Retention) -> None:
        try:
            self._opening.store.retain(policy, self._opening.mirror.needed)
        except (OSError, MemoryError) as error:
            if not disk_failed(error):
                raise  # a later start has the run
            # no failed save: the commit stands, and the other ranks know nothing of this
            told = str(error) if isinstance(error, RunDirError) else f"{error}; {remedy(error)}"
            self._voice.warn(f"what no rule keeps could not be deleted ({told})")

    def _write_whole(self, snapshot: Snapshot) -> CommittedCheckpoint:
        # rows before their checkpoint: a power cut must not leave a checkpoint whose rows are missing
        self._journal.fsync_only(snapshot.position)
        common, own = split(snapshot.encoded, snapshot.own)
        # what is in common counts once: services that report have their state on the writer alone
        mine = snapshot.encoded if self._opening.writer else with_regions(own, common)
        note_digests(mine)
        exchange = self._exchange
        commit = Commit(
            snapshot.name,
            common,
            digest(mine),
            snapshot.epoch,
            snapshot.phase,
            snapshot.partial,
            snapshot.meta,
            snapshot.guarded,
            own,
            {} if exchange is None else digests(common, own, self._together_with),
        )
        if isinstance(exchange, RankExchange):
            return self._part.write_part(commit, exchange)
        return self._opening.store.commit(commit, exchange)

    def _write_best(self, snapshot: Snapshot, action: SaveBest, spread: bool) -> None:
        structure: Any = snapshot.encoded.structure
        arrays = {name: a for name, a in snapshot.encoded.arrays.items() if name.startswith("user/")}
        user = Encoded({"user": structure["user"]}, arrays)
        note_digests(user)
        folder, exchange = self._opening.store.best_folder(action.metric), self._exchange
        commit = Commit(
            snapshot.name,
            user,
            digest(user),
            snapshot.epoch,
            snapshot.phase,
            meta={"metric": action.metric, "value": action.value, "run": self._opening.run_dir.id},
            guarded=snapshot.guarded,
        )
        if isinstance(exchange, RankExchange):
            RankStore(self._opening.run_dir.path, folder).write_part(commit, exchange)
            return
        writing, token = self._opening.store.writing_best, ""
        if spread and exchange is not None:
            writing, token = exchange.leading, secrets.token_hex(4)
        keep, top = {*self._spoken_of(action.metric), *action.beside}, self._opening.run_dir.path
        save_apart(folder, commit, keep=keep, top=top, writing=writing, token=token)

    def _spoken_of(self, metric: str) -> set[str]:
        """Names of best weights in the checkpoints on disk: a resume from such a checkpoint needs its own."""
        return {name for facts in self._opening.store.facts() for name in facts.kept.get(metric, ())}

    def _done(self, committed: CommittedCheckpoint | None) -> None:
        self.error = None
        if committed is not None:
            self.last, self.written = committed, self._clock()
            self._committed.append(committed)
        self._wake()

    def failed(
        self,
        error: OSError | MemoryError,
        name: str = "",
        best: Sequence[SaveBest] = (),
    ) -> None:
        """Count a failed save, and warn; training goes on.

        Args:
            name: the checkpoint that was to be, and `best` the best weights.
        """
        run_dir = self._opening.run_dir.path
        if not run_dir.is_dir():
            error = RunDirError(
                errno.ENOENT,
                "the run directory is gone: bring back what was deleted, moved or unmounted",
                str(run_dir),
            )
        self.failures += 1
        self.error = error
        told = f"({type(error).__name__}: {error}{_where(error, run_dir)}); {remedy(error)}"
        if isinstance(error, RunDirError):
            told = f"({error})"  # which says what to do
        self._voice.warn(f"a save failed, and the previous checkpoint is intact {told}")
        self.in_doubt += [(action.metric, name, action.value) for action in best]

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
        try:
            self._writer.close()
        finally:
            self._spill.close()


def _where(error: OSError | MemoryError, run_dir: Path) -> str:
    """Name the run's disk where an error names no file; where a disk is full, also what is free on it."""
    if not isinstance(error, OSError):
        return ""
    told = "" if error.filename else f", in {run_dir}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        with suppress(OSError):  # of a disk that is lost as well
            told += f", where {disk_usage(run_dir).free:,} bytes are free"
    return told


def _size(array: Any) -> int:
    """Number of bytes of an array's elements."""
    return int(getattr(array, "nbytes", 0))
