"""What our streams cost beside what they replace.

    python bench/data.py [--repeats 15]

CPU time of a batch, both ways in turns on one pinned core: `data.arrays` beside fancy indexing by a
permutation, `data.loader` beside the DataLoader that it wraps (no worker), and the time to open a pass of
2,000,000 samples in its middle.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from figures import Figure, Table, program
from torch.utils.data import DataLoader, TensorDataset

import everstep

ROWS = 20_000
SHAPES = [(8, 32), (64, 784), (256, 784)]
"""Rows of a batch, and numbers of a row."""


def measure(options: argparse.Namespace) -> Iterator[Table]:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    figures = []
    for size, width in SHAPES:
        for kind in ("NumPy", "torch"):
            x: Any = np.random.default_rng(0).random((ROWS, width), np.float32)
            y: Any = np.arange(ROWS)
            if kind == "torch":
                x, y = torch.from_numpy(x), torch.from_numpy(y)
            ours, theirs = in_turns(arrays(x, y, size), indexed(x, y, size), options.repeats)
            name = f"data.arrays over fancy indexing, {kind}, {size} x {width}"
            figures.append(Figure(name, "us", ours, theirs, 1.05))
    dataset = TensorDataset(torch.rand(ROWS, 32), torch.arange(ROWS))
    ours, theirs = in_turns(loader(dataset, 32), plain(dataset, 32), options.repeats)
    figures.append(Figure("data.loader over DataLoader, 32 x 32", "us", ours, theirs))
    figures.append(
        Figure("open a shuffled pass of 2,000,000 samples at sample 1,000,000", "ms", far(), goal=100)
    )
    yield Table("Data", "CPU time of a batch, or of opening a pass.", figures)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=15)


Pass = Callable[[], Iterator[Any]]


def arrays(x: Any, y: Any, size: int) -> Pass:
    stream = everstep.data.arrays(x, y, batch_size=size, shuffle=True)
    return lambda: iter(stream.open("train", 0, seed=1))


def indexed(x: Any, y: Any, size: int) -> Pass:
    def batches() -> Iterator[Any]:
        order: Any = np.random.default_rng(1).permutation(ROWS)
        if isinstance(x, torch.Tensor):
            order = torch.from_numpy(order)
        for at in range(0, ROWS, size):
            part = order[at : at + size]
            yield x[part], y[part]

    return batches


def loader(dataset: Any, size: int) -> Pass:
    stream = everstep.data.loader(dataset, size, shuffle=True)
    return lambda: iter(stream.open("train", 0, seed=1))


def plain(dataset: Any, size: int) -> Pass:
    return lambda: iter(DataLoader(dataset, size, shuffle=True))


def in_turns(ours: Pass, theirs: Pass, repeats: int) -> tuple[list[float], list[float]]:
    """Microseconds of CPU for a batch, of as many passes of each; the first pass of each warms up."""
    found: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        order = (0, 1) if repeat % 2 else (1, 0)
        for which in order:
            batches = islice((ours, theirs)[which](), 300)
            began, count = time.process_time_ns(), sum(1 for _ in batches)
            took = (time.process_time_ns() - began) / count / 1000
            if repeat:
                found[which].append(took)
    return found


def far() -> list[float]:
    """Milliseconds to open a pass in its middle and draw a batch; the pass is shuffled."""
    x = np.zeros(2_000_000, np.uint8)
    found = []
    for seed in range(3):
        stream = everstep.data.arrays(x, batch_size=32, shuffle=True)
        position = stream.open("train", 0, seed=seed).position()
        began = time.process_time()
        next(stream.open("train", 0, {**position, "batches": 1_000_000 // 32}, seed=seed))
        found.append((time.process_time() - began) * 1e3)
    return found


if __name__ == "__main__":
    program(__doc__, measure, add_arguments)
