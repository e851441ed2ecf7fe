"""Counts files, requests and bytes of a save of many ranks: `python tools/scale.py 1000`.

Every rank is a thread that runs everstep's own commit; only the store is another one, in memory, which counts
its requests.  What each rank holds is what torch's fake process group says: a process that is told its rank
and the number of ranks, and communicates with nobody.  The figures are those of docs/scale.md.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from everstep.backends.torch.sharded import region
from everstep.checkpoint import CheckpointName, Draft, Exchange, Store, read_checkpoint, verify_checkpoint
from everstep.contracts.group import Group
from everstep.contracts.state import HostArray, Region
from everstep.group.store_group import StoreGroup
from everstep.state import Encoded, array_name, encode

NAME = CheckpointName(1)
LAYERS, WIDTH = 2, 1024
"""Of the model: each layer has a weight and a bias, sharded over all ranks."""


class CountingStore:
    """Key-value store in memory that counts its requests, and the bytes of their values.

    Attributes:
        counts: number of requests by kind; `has` asks again and again while a rank waits.
        moved: bytes of the values that were set or got.
    """

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self.moved = 0
        self.prefix = ""
        self.lock = threading.Lock()
        self.whole = self

    def clone(self) -> CountingStore:
        return self

    def below(self, prefix: str) -> CountingStore:
        made = CountingStore()
        made.whole, made.prefix, made.lock = self.whole, self.prefix + prefix, self.lock
        return made

    def _count(self, kind: str, *values: str) -> None:
        self.whole.counts[kind] += 1
        self.whole.moved += sum(map(len, values))

    def set(self, key: str, value: str) -> None:
        with self.lock:
            self._count("set", value)
            self.whole.values[self.prefix + key] = value

    def set_all(self, keys: Sequence[str], value: str) -> None:
        for key in keys:
            self.set(key, value)

    def has(self, keys: Sequence[str]) -> bool:
        with self.lock:
            self._count("has")
            return all(self.prefix + key in self.whole.values for key in keys)

    def get(self, keys: Sequence[str]) -> list[str]:
        with self.lock:
            found = [self.whole.values[self.prefix + key] for key in keys]
            self._count("get", *found)
            return found

    def set_once(self, key: str, value: str) -> str:
        with self.lock:
            self._count("set_once", value)
            return self.whole.values.setdefault(self.prefix + key, value)

    def delete(self, key: str) -> None:
        with self.lock:
            self._count("delete")
            self.whole.values.pop(self.prefix + key, None)

    def block(self, key: str) -> None:
        raise NotImplementedError("nobody waits for a bell here")


def held(size: int) -> list[Encoded]:
    """Return what each of `size` ranks holds of a model under `fully_shard`.

    Raises:
        AssertionError: torch's fake process group gives the first, a middle or the last rank other boxes.
    """
    found = [_boxes(size, rank) for rank in range(size)]
    for rank in sorted({0, size // 2, size - 1}):
        assert _in_a_child(size, rank) == found[rank], f"rank {rank} of {size} holds other boxes"
    return list(map(_tree, found))


def _boxes(size: int, rank: int) -> list[Any]:
    """Return the boxes of a rank: equally many rows each, the last ones fewer."""
    rows = -(-WIDTH // size)
    start = min(rank * rows, WIDTH)
    count = min(rows, WIDTH - start)
    wholes = [(f"{n}.{part}", whole) for n in range(LAYERS) for part, whole in _WHOLE.items()]
    return [
        [name, [start, *[0] * len(rest)], [count, *rest], [WIDTH, *rest], [rank]] for name, rest in wholes
    ]


_WHOLE: dict[str, list[int]] = {"weight": [WIDTH], "bias": []}


def _in_a_child(size: int, rank: int) -> list[Any]:
    """Ask for the boxes of a rank in a process of its own: torch keeps the first rank that it was told."""
    reader, writer = os.pipe()
    if child := os.fork():
        os.close(writer)
        with open(reader) as file:
            told = file.read()
        os.waitpid(child, 0)
        return list(json.loads(told))
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, device="meta") for _ in range(LAYERS)))
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    boxes = [(name, region(tensor)) for name, tensor in model.state_dict().items()]
    told = json.dumps([[name, box.offset, box.shape, box.whole, box.holders] for name, box in boxes if box])
    with open(writer, "w") as file:
        file.write(told)
    os._exit(0)


def _tree(boxes: list[Any]) -> Encoded:
    """Make what `encode` makes of a model's tensors of which this rank holds these boxes."""
    structure: dict[str, Any] = {}
    arrays = {}
    for name, offset, shape, whole, holders in boxes:
        full = array_name(("user", "model", name))
        structure[name] = {"$array": full}
        data = np.zeros(math.prod(shape) * 4, np.uint8)
        box = Region(tuple(offset), tuple(shape), tuple(whole), tuple(holders))
        arrays[full] = HostArray("F32", tuple(shape), data, "torch", {}, box)
    return Encoded({"user": {"model": structure}}, arrays)


def together(size: int, work: Callable[[int], object]) -> float:
    """Run `work` for each rank in a thread of its own; returns the seconds."""
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return time.monotonic() - began


def save(size: int, run_dir: Path) -> dict[str, Any]:
    """Make two saves of `size` ranks, and count what the second one needs."""
    store, trees = CountingStore(), held(size)
    writer = Store(run_dir, 1)
    exchanges = [Exchange(Group(rank, size, store, 300.0)) for rank in range(size)]

    def save_on(rank: int, step: int) -> None:
        own = encode({"rng": {f"rank{rank}": np.arange(8) + step}})
        draft = Draft(
            CheckpointName(step), trees[rank], f"{step} {rank}", own=own, replicated={"progress": str(step)}
        )
        exchange = exchanges[rank]
        with exchange.save():
            if exchange.leads:
                writer.commit(draft, exchange)
            else:
                exchange.write_part(writer.folder, draft)

    together(size, lambda rank: save_on(rank, 1))
    first, store.counts, store.moved = store.counts, Counter(), 0
    for tree in trees:  # all weights change, as in training
        for array in tree.arrays.values():
            array.data[:1] += 1
            array.xxh3_128 = None
    seconds = together(size, lambda rank: save_on(rank, 2))
    folder = run_dir / "checkpoints" / str(CheckpointName(2))
    return {
        "ranks": size,
        "files": len(list(folder.iterdir())),
        "manifest": (folder / "manifest.json").stat().st_size,
        "requests": sum(store.counts[kind] for kind in ("set", "get", "set_once", "delete")),
        "first": sum(first[kind] for kind in ("set", "get", "set_once", "delete")),
        "values": store.moved,
        "seconds": seconds,
        "folder": folder,
    }


def gather(size: int) -> dict[str, int]:
    """Let `size` ranks meet and gather thrice; count the requests of the third."""
    store, groups, counts = CountingStore(), {}, []

    def meet(rank: int) -> None:
        groups[rank] = StoreGroup(rank, size, store, 300.0)

    together(size, meet)
    for _ in range(3):
        store.counts, store.moved = Counter(), 0
        together(size, lambda rank: groups[rank].gather(rank, "a number"))
        counts.append((sum(store.counts[kind] for kind in ("set", "get", "delete")), store.moved))
    requests, moved = counts[-1]
    return {"requests": requests, "values": moved}


def read(folder: Path) -> dict[str, float]:
    """Seconds that one process needs to read, verify and partly read a checkpoint."""
    times = {}
    name = f"user/model/{LAYERS - 1}.bias"
    ways: dict[str, Callable[[], object]] = {
        "read": lambda: read_checkpoint(folder),
        "verified": lambda: verify_checkpoint(folder),
        "one array": lambda: read_checkpoint(folder, 0, lambda each: each == name),
    }
    for what, work in ways.items():
        began = time.monotonic()
        work()
        times[what] = time.monotonic() - began
    return times


def main(size: int) -> None:
    """Print the figures of `size` ranks as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        found = save(size, Path(folder))
        times = read(found.pop("folder"))
    print(json.dumps({"save": found, "gather": gather(size), "seconds to": times}, indent=1))


if __name__ == "__main__":
    main(int(sys.argv[1]))
