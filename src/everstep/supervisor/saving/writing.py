"""A snapshot of the state, copied on the main thread, and its writing on the writer thread."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from everstep.checkpoint import (
    CheckpointName,
    Commit,
    CommittedCheckpoint,
    Phase,
    RankExchange,
    Retention,
    WriterExchange,
    disk_failed,
    save_apart,
)
from everstep.contracts.services import SaveBest
from everstep.durable import remedy
from everstep.errors import RunDirError
from everstep.record import Position
from everstep.state import Encoded, capture, digest, note_digests, split, with_regions
from everstep.supervisor.opening.open_run import OpenRun
from everstep.supervisor.saving.rank_parts import own_paths
from everstep.supervisor.saving.replicas import digests
from everstep.supervisor.saving.state_tree import random_parts

if TYPE_CHECKING:
    from everstep.supervisor.engine import Engine


@dataclass(frozen=True)
class Snapshot:
    """Copy of the whole state at one boundary: training may continue meanwhile.

    Attributes:
        name, guarded, phase, epoch, partial, meta: as in `Commit`.
        encoded: the tree; its arrays lie in the saver's kept buffers until the next snapshot.
        own: paths of what is this rank's own; empty on one process.
        prove: tries, before the commit, what the state claims of live arrays; None: it claims nothing.
        position: end of the journal's rows that belong to this state.
    """

    name: CheckpointName
    encoded: Encoded
    own: frozenset[tuple[str, ...]]
    guarded: frozenset[str]
    prove: Callable[[], None] | None
    phase: Phase
    epoch: int
    partial: bool
    meta: dict[str, Any]
    position: Position

    @property
    def interim(self) -> bool:
        """Whether the checkpoint only replaces the later one at the epoch's end: observers are not told."""
        return bool(self.meta.get("interim"))


def take_snapshot(engine: Engine, name: CheckpointName, phase: Phase) -> Snapshot:
    """Copy the state of all parts of a run into the saver's buffers.

    The order matters: the verifier compares the copy before the rows are flushed, and the position that the
    flush returns is the end of the rows that belong to this state.
    """
    current, board, recovered = engine.progress, engine.board, engine.recovered
    rank, data = engine.ranks.group.rank, engine.ranks.group.data
    current.updates = engine.user.updates
    user = engine.user.save()
    for warning in engine.user.outgrown(user["user"]):
        engine.voice.warn(warning)
    # inside an epoch its head has run, and what it did to data that is not opened yet stays known
    streams, words = engine.streams.tree(head_may_follow=phase == "epoch" or current.epoch == 0)
    wall = {"segment": engine.segment, "seconds": engine.seconds(), **user.pop("wall")}
    if words:
        wall["streams"] = words
    services = {**board.state(), "metrics": {"version": 1, "state": engine.collector.state()}}
    now, again = random_parts(rank)
    tree = {
        "progress": current.tree(phase),
        **user,
        "streams": streams,
        "rng": {now: capture(), again: engine.rng_marks.tree()},
        "services": services,
        "wall": wall,
    }
    own = frozenset[tuple[str, ...]]()
    if engine.ranks.several:
        own = own_paths(rank, engine.user.rank_paths(), engine.streams.rank_paths())
    encoded = engine.saver.encode(tree)
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
        "rollbacks": [rollback.stored() for rollback in engine.rollbacks.decided],
        "fingerprint": recovered.fingerprint,
        "one_fingerprint": recovered.one_fingerprint,
        "data_ranks": None if data.in_order else list(data.of),
    }
    return Snapshot(
        name=name,
        encoded=encoded,
        own=own,
        guarded=engine.user.guarded(user["user"], encoded.arrays)
        if any(service.guards_state for service in board)
        else frozenset(),
        prove=engine.user.prove(),
        phase=phase,
        epoch=current.epoch,
        partial=phase == "epoch" and engine.loop.is_partial(),
        meta=meta,
        position=position,
    )


class Writing:
    """Jobs of the writer thread, one at a time; every rank writes its part of a checkpoint."""

    def __init__(self, opening: OpenRun, retention: Retention) -> None:
        self._opening, self._retention = opening, retention
        self._journal, group = opening.journal, opening.group
        self._together_with = group.data.together(group.rank)
        self._exchange: WriterExchange | RankExchange | None = None
        if group.size > 1:
            self._exchange = WriterExchange(group) if group.writer else RankExchange(group)
        self.digest: str | None = None
        """Digest of the newest committed state, that of an interim checkpoint included."""

    def write(self, snapshot: Snapshot, best: Sequence[SaveBest], whole: bool) -> CommittedCheckpoint | None:
        """Write a snapshot; return the commit that observers hear of, if there is one."""
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
            self._opening.mirror.retain_and_upload(self._journal.durable, self.retain)
        return None if snapshot.interim else committed

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
        store = self._opening.store
        self._opening.mirror.retain_and_upload(0, lambda: self._retain(Retention(keep_last=None)))
        for problem in store.check_best():
            self._opening.voice.warn(problem)

    def retain(self) -> None:
        """Delete what the rule does not keep, on the writer thread or while it has nothing to do."""
        self._retain(self._retention)

    def _retain(self, policy: Retention) -> None:
        try:
            self._opening.store.retain(policy, self._opening.mirror.needed)
        except (OSError, MemoryError) as error:
            if not disk_failed(error):
                raise  # a later start has the run
            # no failed save: the commit is done, and the other ranks know nothing of this
            reason = str(error) if isinstance(error, RunDirError) else f"{error}; {remedy(error)}"
            self._opening.voice.warn(f"checkpoints that no rule keeps could not be deleted ({reason})")

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
            return exchange.write_part(self._opening.store.folder, commit)
        return self._opening.store.commit(commit, exchange)

    def _write_best(self, snapshot: Snapshot, action: SaveBest, spread: bool) -> None:
        structure: Any = snapshot.encoded.structure
        arrays = {name: a for name, a in snapshot.encoded.arrays.items() if name.startswith("user/")}
        user = Encoded({"user": structure["user"]}, arrays)
        note_digests(user)
        store, exchange = self._opening.store, self._exchange
        folder = store.best_folder(action.metric)
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
            exchange.write_part(folder, commit)
            return
        together: dict[str, Any] = {}
        if spread and exchange is not None:
            together = {"writing": exchange.leading, "token": secrets.token_hex(4)}
        # a resume from a checkpoint on disk needs the best weights that it names
        needed = {name for facts in store.facts() for name in facts.kept.get(action.metric, ())}
        keep, top = {*needed, *action.beside}, self._opening.run_dir.path
        save_apart(folder, commit, keep=keep, top=top, **together)
