"""Snapshots: the whole state tree, copied at a boundary."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from everstep.checkpoint import CheckpointName, Phase
from everstep.services.best import Best
from everstep.services.nan_guard import NaNGuard
from everstep.supervisor.saving import Snapshot
from everstep.supervisor.tree import whole_tree

if TYPE_CHECKING:
    from everstep.supervisor.engine import Engine


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
    )
    guard = board.find(NaNGuard)
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
        guarded=engine.user.guarded(user["user"]) if guard and guard.parameters else frozenset(),
        phase=phase,
        epoch=current.epoch,
        partial=phase == "epoch" and engine.loop.is_partial(),
        meta=meta,
        position=position,
    )
