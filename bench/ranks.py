"""Time of a step on several ranks, beside the same loop with DistributedDataParallel written by hand.

    python bench/ranks.py [--ranks 2] [--repeats 40] [--steps 100]

A tiny MLP (32-32-1, batch 32 on each rank, SGD, gloo), one thread a rank.  On each rank, blocks of steps by
hand and of everstep alternate; the figure is the median of the ratios of neighbouring blocks, in wall time,
with its quartiles.  "by hand against by hand" must come out near 1.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from turns import Stream, without_hooks

Block = Callable[[int], None]
"""Runs so many steps."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--steps", type=int, default=100, help="steps in a block")
    parser.add_argument("--folder", help="for the runs; made by the first process")
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv, "--folder", folder]
        ranks = [
            subprocess.Popen(command, env=environment(rank, options.ranks, port))
            for rank in range(options.ranks)
        ]
        status = max(rank.wait() for rank in ranks)
    sys.exit(status)


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    return {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1", **where}


def measure(options: argparse.Namespace) -> None:
    import torch

    import everstep

    torch.set_num_threads(1)
    first = os.environ["RANK"] == "0"
    if first:
        print(f"{options.ranks} ranks{'':24}{'by hand us':>12}{'ratio':>8}{'quartiles':>16}")
    cases: dict[str, Any] = {
        "by hand against by hand": None,
        "nothing due": False,
        "a metric each step": True,
        f"VirtualShards({SHARDS})": "shards",
    }
    for name, collect in cases.items():
        # opens the process group
        shared = model() if collect == "shards" else everstep.torch.parallel(model())
        with block_of(Path(options.folder) / name.replace(" ", "-"), shared, collect) as block:
            hand = without_hooks(by_hand(everstep.torch.parallel(model())))
            times, ratios = [], []
            hand(options.steps), block(options.steps)
            for repeat in range(options.repeats):
                pair = [(hand, 0), (block, 1)]
                took = [0.0, 0.0]
                for run, index in pair if repeat % 2 else pair[::-1]:
                    began = time.perf_counter()
                    run(options.steps)
                    took[index] = time.perf_counter() - began
                times.append(took[0] / options.steps * 1e6)
                ratios.append(took[1] / took[0])
        low, _, high = statistics.quantiles(ratios, n=4)
        if first:
            spread = f"{low:.3f} to {high:.3f}"
            print(f"{name:31}{statistics.median(times):12.1f}{statistics.median(ratios):8.3f}{spread:>16}")


class Same(Stream):
    """Ready batches, which each rank has made by itself."""

    def split(self, share: Any) -> Same:
        return self


def model() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))


def batches() -> Any:
    import torch

    return [(torch.rand(32, 32), torch.rand(32, 1)) for _ in range(50)]


SHARDS = 4
"""Number of virtual shards; a multiple of the number of ranks."""


def stepping(model: Any, shards: Any = None) -> tuple[Any, Callable[[Any], Any]]:
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def in_shards(batch: Any) -> Any:
        optimizer.zero_grad()
        loss = shards.backward(batch, lambda part: torch.nn.functional.mse_loss(model(part[0]), part[1]))
        optimizer.step()
        return loss

    if shards is not None:
        return optimizer, in_shards

    def step(batch: Any) -> Any:
        x, y = batch
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return optimizer, step


def by_hand(model: Any) -> Block:
    source, (_, step) = cycle(batches()), stepping(model)

    def run(steps: int) -> None:
        for batch in islice(source, steps):
            step(batch)

    return run


@contextmanager
def block_of(run_dir: Path, model: Any, collect: bool | str | None) -> Iterator[Block]:
    """Make the block of a case: whether a metric is collected, or "shards"; None: by hand."""
    import everstep

    if collect is None:
        yield by_hand(model)
        return
    shards = everstep.torch.VirtualShards(model, SHARDS) if collect == "shards" else None
    optimizer, step = stepping(model, shards)
    state = {"model": model, "optimizer": optimizer} | ({} if shards is None else {"shards": shards})
    services = [everstep.Checkpoints(everstep.Never())]
    with everstep.TrainLoop(run_dir, state, default_services=False, services=services) as loop:
        for _epoch in loop.iter_epochs():
            steps = loop.iter_steps(Same(batches()))

            yield everstep_block(loop, steps, step, collect is True)
            loop.request_stop("measured")
            next(steps, None)


def everstep_block(loop: Any, steps: Iterator[Any], step: Callable[[Any], Any], collect: bool) -> Block:
    def run(count: int) -> None:
        for _, batch in islice(steps, count):
            loss = step(batch)
            if collect:
                loop.collect_metrics(loss=loss)

    return run


if __name__ == "__main__":
    main()
