"""Snapshot of a run: its state at one boundary, copied on the main thread."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from everstep.checkpoint import CheckpointName, Phase
from everstep.record import Position
from everstep.state import Encoded
from everstep.supervisor.saving.rank_parts import own_paths
from everstep.supervisor.saving.state_tree import whole_tree

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
        prove: tries, before the commit, what the state claims of live arrays; None: it claims nothing.
        phase, epoch, partial, meta: for the manifest.
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
    tree = whole_tree(
        progress=current.tree(phase),
        user=user,
        streams=streams,
        lines=engine.rng_marks.tree(),
        services=board.state(),
        metrics=engine.collector.state(),
        wall=wall,
        rank=rank,
    )
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
