"""Saves of several ranks, for simulations and for real processes."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np

from everstep.checkpoint import Checkpoint, CheckpointName, Draft, Exchange, Retention, Store
from everstep.contracts.group import Group
from everstep.state import Encoded, decode, encode

STEPS = (20, 30, 40)


def common_of(seed: int) -> Encoded:
    return encode({"user": {"w": np.full(1000, seed)}, "progress": {"step": seed}})


def own_of(seed: int, rank: int) -> Encoded:
    return encode({"rng": {f"rank{rank}": np.arange(5) + 10 * seed + rank}})


class Rank:
    """What a rank saves with."""

    def __init__(self, run_dir: Path, group: Group, limit: float | None = None) -> None:
        self.group, self.run_dir = group, run_dir
        run_dir.mkdir(exist_ok=True)
        self.store = Store(run_dir, 1)
        of_saves = copy(group)
        of_saves.limit = limit or group.limit
        self.exchange = Exchange(of_saves)
        self.begun, self.saved = -1, -1
        """The last step of which a save has begun, and has ended well."""

    def save(self, step: int, before: Callable[[], object] = bool, **more: Any) -> Any:
        common, rank = more.pop("common", common_of(step)), self.group.rank
        told: dict[str, Any] = {"digest": f"{step} of {rank}", "own": own_of(step, rank)}
        told |= {"replicated": {"user/w": f"{step}"}, **more}
        draft = Draft(CheckpointName(step), common, **told)
        with self.exchange.save():
            before()
            if self.exchange.leads:
                return self.store.commit(draft, self.exchange)
            return self.exchange.write_part(self.store.folder, draft)

    def attempt(self, step: int, before: Callable[[], object] = lambda: None, **more: Any) -> str:
        """Save; how that ends, in words."""
        self.begun = step
        try:
            done = self.save(step, before, **more)
        except Exception as error:
            return f"{type(error).__name__} {error} {getattr(error, 'ranks', '')}"
        self.saved = step
        return f"saved {done.bytes} {done.kept} {done.digest}"

    def retain(self) -> None:
        if self.group.writer:
            self.store.retain(Retention(keep_last=2))


def step_of(found: Checkpoint | None, size: int) -> int:
    """Step of a checkpoint that must be whole, for all ranks."""
    if found is None:
        return -1
    assert found.ranks == size
    for rank in range(size + 1):
        mine = found if rank == 0 else Store(found.path.parent.parent).read(found.name, rank)
        tree = decode(Encoded(mine.structure, mine.arrays))
        assert (tree["user"]["w"] == found.step).all() and tree["progress"] == {"step": found.step}
        own = {f"rank{rank}": list(np.arange(5) + 10 * found.step + rank)} if rank < size else {}
        assert {name: list(value) for name, value in tree.get("rng", {}).items()} == own
    return found.step


def require_whole(run_dir: Path, size: int, saved: int, begun: int) -> None:
    """After a kill: the newest or the previous checkpoint is there, nothing else, and the next save works."""
    store = Store(run_dir, 2)
    store.clean()
    found, notes = store.find(True)
    assert saved <= step_of(found, size) <= begun
    assert notes == [] and not list(run_dir.rglob(".tmp-*"))
    store.commit(Draft(CheckpointName(500), common_of(500), "d", own=own_of(500, 0)))  # of one process
    store.retain(Retention(keep_last=1))
    assert step_of(store.find(True)[0], 1) == 500
