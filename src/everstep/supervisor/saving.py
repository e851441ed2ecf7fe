"""From the live state to a committed checkpoint: snapshot on the main thread, the rest behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.checkpoint import CheckpointName, CommittedCheckpoint, Retention, Store, Writer, save_apart
from everstep.contracts import SaveBest
from everstep.record import Journal, Position
from everstep.state import Buffers, Encoded, digest, encode
from everstep.supervisor.progress import Phase


@dataclass(frozen=True)
class Snapshot:
    """The whole state at one boundary, copied: training may go on.

    Attributes:
        name: what it will be called.
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


class Saver:
    """Owns the kept buffers, the store and the writer thread.

    Args:
        store: where checkpoints are committed.
        journal: made durable up to a snapshot's position before that is committed.
        retention: which checkpoints stay.
        wake: called from the writer thread when something ended; must only set plain attributes.
        warn: says a failed save to the user.

    Attributes:
        committed: checkpoints committed and not yet announced, oldest first.
        last: the newest commit of this process.
        failures: how many saves failed.
    """

    def __init__(
        self,
        store: Store,
        journal: Journal,
        retention: Retention,
        wake: Callable[[], None],
        warn: Callable[[str], None],
    ) -> None:
        self.store, self._journal, self._retention = store, journal, retention
        self._wake, self._warn = wake, warn
        self._buffers = Buffers()
        self.writer = Writer(warn)
        self.committed: list[CommittedCheckpoint] = []
        self.last: CommittedCheckpoint | None = None
        self.failures = 0
        self.error: OSError | MemoryError | None = None
        """What made the newest save fail; None after one that succeeded."""

    def encode(self, tree: dict[str, Any]) -> Encoded:
        """Copy the state into the kept buffers, once the running write no longer needs them."""
        self.writer.wait()
        return encode(tree, self._buffers)

    def commit(self, snapshot: Snapshot, best: Sequence[tuple[SaveBest, Path]] = (), whole: bool = True) -> None:
        """Start writing a snapshot: the best weights first, then, if `whole`, the checkpoint."""
        self.writer.submit(lambda: self._write(snapshot, best, whole), self._done, self._failed)

    def _write(
        self, snapshot: Snapshot, best: Sequence[tuple[SaveBest, Path]], whole: bool
    ) -> CommittedCheckpoint | None:
        for action, folder in best:
            user = _only_user(snapshot.encoded)
            save_apart(
                folder,
                snapshot.name,
                user.structure,
                user.arrays,
                digest=digest(user),
                epoch=snapshot.epoch,
                phase=snapshot.phase,
                meta={"metric": action.metric, "value": action.value},
                guarded=snapshot.guarded,
                keep=self._referenced(action.metric),
            )
        if not whole:
            return None
        self._journal.fsync_only(snapshot.position)
        committed = self.store.commit(
            snapshot.name,
            snapshot.encoded.structure,
            snapshot.encoded.arrays,
            digest=digest(snapshot.encoded),
            epoch=snapshot.epoch,
            phase=snapshot.phase,
            partial=snapshot.partial,
            meta=snapshot.meta,
            guarded=snapshot.guarded,
        )
        self.store.retain(self._retention, protect=set())
        return committed

    def _referenced(self, metric: str) -> set[str]:
        """Names of the best records that a checkpoint on disk speaks of: a resume may want them."""
        found = (self.store.meta(name)["best"].get(metric) for name in self.store.names())
        return {record["name"] for record in found if record is not None}

    def _done(self, committed: CommittedCheckpoint | None) -> None:
        self.error = None
        if committed is not None:
            self.last = committed
            self.committed.append(committed)
        self._wake()

    def _failed(self, error: OSError | MemoryError) -> None:
        self.failures += 1
        self.error = error
        self._warn(f"a checkpoint could not be saved ({type(error).__name__}: {error}); the previous one is intact")
        self._wake()

    def close(self, wait: bool) -> None:
        """End the writer thread; `wait` for what it is writing."""
        self.writer.close(wait)


def _only_user(encoded: Encoded) -> Encoded:
    assert isinstance(encoded.structure, dict)
    arrays = {name: array for name, array in encoded.arrays.items() if name.startswith("user/")}
    return Encoded({"user": encoded.structure["user"]}, arrays)
