"""Writing of a snapshot on the writer thread: the best weights, then the checkpoint that names them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from everstep.checkpoint import (
    Commit,
    CommittedCheckpoint,
    RankExchange,
    Retention,
    WriterExchange,
    disk_failed,
    save_apart,
)
from everstep.contracts.group import Group
from everstep.contracts.services import SaveBest
from everstep.durable import remedy
from everstep.errors import RunDirError
from everstep.record import Journal
from everstep.state import Encoded, digest, note_digests, split, with_regions
from everstep.supervisor.opening.open_run import OpenRun
from everstep.supervisor.saving.replicas import digests
from everstep.supervisor.saving.snapshot import Snapshot


class Writing:
    """Jobs of the writer thread, one at a time; every rank writes its part of a checkpoint.

    Attributes:
        digest: digest of the newest committed state, that of an interim checkpoint included.
    """

    def __init__(
        self,
        opening: OpenRun,
        journal: Journal,
        retention: Retention,
        group: Group,
        warn: Callable[[str], None],
    ) -> None:
        self._opening, self._journal, self._retention, self._warn = opening, journal, retention, warn
        self._together_with = group.data.together(group.rank)
        self._exchange: WriterExchange | RankExchange | None = None
        if group.size > 1:
            self._exchange = WriterExchange(group) if group.writer else RankExchange(group)
        self.digest: str | None = None

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
            self._opening.mirror.committed(self._journal.durable, self.retain)
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
                self._opening.store.settle()
            yield

    def tidy(self) -> None:
        """Tidy up after earlier starts, before anything is saved."""
        store = self._opening.store
        self._opening.mirror.committed(0, lambda: self._retain(Retention(keep_last=None)))
        for problem in store.check_best():
            self._warn(problem)

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
            self._warn(f"checkpoints that no rule keeps could not be deleted ({reason})")

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
