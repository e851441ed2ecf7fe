"""Saves of several ranks, as a module for their processes; and all kills of a rank in them, as a program.

`python rank_saves.py FOLDER SIZE PART PARTS` leaves FOLDER/NUMBER/run and .../log, and prints "NUMBER RANK
SPEC" for each kill: of each rank, at each hazard that it reaches; of all these, part PART of PARTS.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from everstep import hazard
from everstep.checkpoint import (
    Checkpoint,
    CheckpointName,
    CommittedCheckpoint,
    RankExchange,
    RankStore,
    Retention,
    Store,
    WriterExchange,
)
from everstep.contracts.group import Group
from everstep.state import Encoded, decode, encode

PARENT = os.getpid()


BASE, MEMORY = np.arange(9_000), np.arange(10_000)
"""What does not change: of all ranks, and of each rank."""


def common_of(seed: int) -> Encoded:
    return encode({"user": {"w": np.full(1000, seed), "base": BASE}, "progress": {"step": seed}})


def own_of(seed: int, rank: int) -> Encoded:
    new = {f"rank{rank}": np.arange(5) + 10 * seed + rank}
    return encode({"rng": new, "memory": {f"rank{rank}": MEMORY + rank}})


class Rank:
    """What a rank saves with."""

    def __init__(self, run_dir: Path, group: Group, limit: float | None = None) -> None:
        self.group, self.run_dir = group, run_dir
        run_dir.mkdir(exist_ok=True)
        self.store = Store(run_dir, 1) if group.writer else RankStore(run_dir)
        self.exchange: Any = (WriterExchange if group.writer else RankExchange)(group, limit)

    def save(
        self, step: int, before: Callable[[], object] = lambda: None, **more: Any
    ) -> CommittedCheckpoint:
        common, rank = more.pop("common", common_of(step)), self.group.rank
        told: dict[str, Any] = {"digest": f"{step} of {rank}", "own": own_of(step, rank)}
        told |= {"replicated": {"user/w": f"{step}"}, "ranks": self.exchange, **more}
        with self.exchange.save():
            before()
            if isinstance(self.store, RankStore):
                return self.store.write_part(CheckpointName(step), common, **told)
            told |= {"epoch": 1, "phase": "step"}
            return self.store.commit(CheckpointName(step), common.structure, common.arrays, **told)


def step_of(found: Checkpoint | None, size: int) -> int:
    """Step of a checkpoint that must be whole, for all ranks."""
    if found is None:
        return -1
    assert found.ranks == size
    for rank in range(size + 1):
        mine = found if rank == 0 else Store(found.path.parent.parent).read(found.name, rank)
        tree = decode(Encoded(mine.structure, mine.arrays))
        assert (tree["user"]["w"] == found.step).all() and tree["progress"] == {"step": found.step}
        assert (tree["user"]["base"] == BASE).all()
        if rank < size:
            assert (tree["memory"][f"rank{rank}"] == MEMORY + rank).all()
        own = {f"rank{rank}": list(np.arange(5) + 10 * found.step + rank)} if rank < size else {}
        assert {name: list(value) for name, value in tree.get("rng", {}).items()} == own
    return found.step


# ------------------------------------------------------------------------------------- the program


def act(folder: Path, group: Group) -> None:
    rank = Rank(folder / "run", group)
    for step in (20, 30, 40):
        note(folder, f"begin {step}")
        rank.save(step)
        note(folder, f"end {step}")
        if group.writer:
            rank.store.retain(Retention(keep_last=2))  # type: ignore[union-attr]


def note(folder: Path, line: str) -> None:
    with (folder / "log").open("a") as file:
        file.write(line + "\n")


def play(folder: Path, size: int, port: int, specs: dict[int, str]) -> dict[int, int]:
    """Let `size` ranks act, each with its hazard; when one dies, the others do; returns their wait status."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    from everstep.backends.torch.key_value_store import TorchStore
    from everstep.group import StoreGroup

    folder.mkdir(parents=True)
    ranks: dict[int, int] = {}
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            status = 1
            faulthandler.dump_traceback_later(40)
            try:
                store = PrefixStore(f"{folder}/", TCPStore("127.0.0.1", port, is_master=False))
                group = StoreGroup(rank, size, TorchStore(store), 60)
                group.barrier("the start")
                hazard.arm(specs.get(rank))
                act(folder, group)
                hazard.arm(None)
                group.barrier("the end")
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)
        ranks[pid] = rank
    found: dict[int, int] = {}
    while ranks:
        pid, status = os.waitpid(0, 0)
        found[ranks.pop(pid)] = status
        if status:
            time.sleep(0.02 if status == signal.SIGKILL else 0)  # the others go on as far as they can
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return found


def host() -> int:
    """Host a store in a process of its own, as torchrun does; returns its port.

    This process stays without threads: a fork in the presence of threads may find a lock taken for ever.
    """
    reading, writing = os.pipe()
    if os.fork() == 0:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(server.port).encode())
        while os.getppid() == PARENT:
            time.sleep(0.2)
        os._exit(0)
    return int(os.read(reading, 20))


def main(root: Path, size: int, part: int, parts: int) -> None:
    common_of(0)  # imports the backends, which each forked rank would do otherwise
    port = host()
    traces = {rank: root / f"trace-{rank}" for rank in range(size)}
    ended = play(root / "0", size, port, {rank: f"trace:{path}" for rank, path in traces.items()})
    assert set(ended.values()) == {0}, ended
    kills = [
        (rank, f"kill:{point}:{n}")
        for rank, path in traces.items()
        for point, count in Counter(path.read_text().split()).items()
        for n in range(1, count + 1)
    ]
    for number, (rank, spec) in enumerate(kills[part::parts], 1):
        ended = play(root / str(number), size, port, {rank: spec})
        assert ended[rank] == signal.SIGKILL, (spec, ended)
        print(number, rank, spec)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
