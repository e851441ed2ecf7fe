"""Saving: the live state is copied on the main thread, and committed by the writer thread."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.checkpoint import CheckpointName, CommittedCheckpoint, Phase, Retention, Writer, save_apart
from everstep.contracts.services import SaveBest
from everstep.durable import remedy
from everstep.errors import RunDirError
from everstep.record import Journal, Position
from everstep.state import Buffers, Encoded, digest, encode
from everstep.supervisor.opening import Opening
from everstep.supervisor.retrying import Retries
from everstep.supervisor.voice import Voice


@dataclass(frozen=True)
class Snapshot:
    """Copy of the whole state at one boundary: training may continue meanwhile.

    Attributes:
        name: the name of the checkpoint to be.
        encoded: the tree; its arrays lie in the saver's kept buffers until the next snapshot.
        guarded: names of the arrays that must be finite to be committed.
        phase, epoch, partial, meta: for the manifest.
        position: end of the journal's rows that belong to this state.
    """

    name: CheckpointName
    encoded: Encoded
    guarded: frozenset[str]
    phase: Phase
    epoch: int
    partial: bool
    meta: dict[str, Any]
    position: Position

    @property
    def interim(self) -> bool:
        """Whether the checkpoint only stands in for that at the epoch's end: observers are not told."""
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
    ) -> None:
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

        self._writer.submit(see_to_it, warn)

    def commit(self, snapshot: Snapshot, best: Sequence[SaveBest] = (), *, whole: bool = True) -> None:
        """Start writing: the best weights first, then, if `whole`, the checkpoint that names them."""
        what = f"the save of {snapshot.name}"

        def write() -> CommittedCheckpoint | None:
            return self._retries.in_place(what, lambda: self._write(snapshot, best, whole))

        self._writer.submit(write, self._done, self._failed)

    def _write(self, snapshot: Snapshot, best: Sequence[SaveBest], whole: bool) -> CommittedCheckpoint | None:
        self._opening.lock.keep()
        # before the checkpoint, which names them: a resume from it needs them on disk
        for action in best:
            self._write_best(snapshot, action)
        if not whole:
            return None
        # rows before their checkpoint: a power cut must not leave a checkpoint whose rows are missing
        self._journal.fsync_only(snapshot.position)
        total = digest(snapshot.encoded)
        committed = self._opening.store.commit(
            snapshot.name,
            snapshot.encoded.structure,
            snapshot.encoded.arrays,
            digest=total,
            epoch=snapshot.epoch,
            phase=snapshot.phase,
            partial=snapshot.partial,
            meta=snapshot.meta,
            guarded=snapshot.guarded,
        )
        self.digest = total
        # only now: until the new checkpoint is durable, the older ones are what a resume has
        self._opening.store.retain(self._retention)
        return None if snapshot.interim else committed

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
        self._voice.warn(f"a save failed, the checkpoint before is intact ({told}); {self.remedy}")

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

    def settle(self, *, wait: bool) -> None:
        """Raise the unexpected error of a write, if there is one; `wait` for the running write first."""
        if wait:
            self._writer.wait()
        else:
            self._writer.poll()

    def close(self) -> None:
        """Wait for the running write, and end the writer thread."""
        self._writer.close()
