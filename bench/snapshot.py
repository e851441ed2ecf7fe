"""What a checkpoint of 50 million parameters with Adam costs on the CPU.

    python bench/snapshot.py [--repeats 7] [--millions 50]

"blocked" is the time from the end of a step to the beginning of the next with a save between, in wall
time, against one copy of the same arrays into kept buffers; "total" is the time until the checkpoint is
committed (written, hashed, fsynced, renamed), against a raw write of the same bytes with fsync.  Copies,
raw writes and saves take turns; the ratios are of medians.  On a machine with neighbours wall time tells
of them, too: the same ratio in CPU time of the training thread does not.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import everstep
from everstep import Never


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--millions", type=int, default=50, help="parameters")
    parser.add_argument("--folder", help="on the disk to measure; default: the system's temporary one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        report(Path(folder), options.millions, options.repeats)


def report(folder: Path, millions: int, repeats: int) -> None:
    state = make_state(millions)
    tensors = list(arrays_of(state))
    size = sum(t.nbytes for t in tensors)
    buffers = [np.ones(t.nbytes, np.uint8) for t in tensors]  # ones: every page is there
    copies, writes, blocked, totals = [], [], [], []
    cpu_copies, cpu_blocked = [], []
    update(state)
    before = resident()
    with everstep.TrainLoop(
        folder / "run", state, max_epoch=1, max_step=repeats + 2, default_services=False, services=[quiet()]
    ) as loop:
        entered = resident()
        saved_at = cpu_at = 0.0
        for _epoch in loop.iter_epochs():
            for step in loop.iter_steps():
                if saved_at:
                    blocked.append(time.perf_counter() - saved_at)
                    cpu_blocked.append(time.thread_time() - cpu_at)
                    totals.append(wait_for(folder / "run", f"step-{step - 1:08d}") - saved_at)
                if step == 1:
                    wait_for(folder / "run", "epoch-0000-step-00000000")
                writes.append(timed(lambda: raw_write(folder / "raw", buffers)))
                update(state)
                for _ in range(3):
                    cpu_at = time.thread_time()
                    copies.append(timed(lambda: copy(tensors, buffers)))
                    cpu_copies.append(time.thread_time() - cpu_at)
                loop.make_checkpoint()
                saved_at, cpu_at = time.perf_counter(), time.thread_time()
        peak = resident()
    copied, written = statistics.median(copies), statistics.median(writes)
    cpu_copied, cpu_block = statistics.median(cpu_copies), statistics.median(cpu_blocked)
    first, block, total = blocked[0], statistics.median(blocked), statistics.median(totals)
    rows = [
        ("one copy into kept buffers, ms", copied * 1e3, 1.0, ""),
        ("blocked by a save, ms", block * 1e3, block / copied, "1.15"),
        ("blocked by the first save, ms", first * 1e3, first / copied, "1.15"),
        ("CPU of one copy, ms", cpu_copied * 1e3, 1.0, ""),
        ("CPU of the blocked thread, ms", cpu_block * 1e3, cpu_block / cpu_copied, "1.15"),
        ("raw write and fsync, ms", written * 1e3, 1.0, ""),
        ("until it is committed, ms", total * 1e3, total / written, "1.3"),
        ("memory after entering, MB", (entered - before) / 1e6, (entered - before) / size, "1"),
        ("memory at the end, MB", (peak - before) / 1e6, (peak - before) / size, "1"),
    ]
    print(f"{size / 1e6:.0f} MB of state in {len(tensors)} arrays")
    print(f"{'':34}{'':>9}{'ratio':>8}{'goal':>6}")
    for name, value, ratio, goal in rows:
        print(f"{name:34}{value:9.1f}{ratio:8.2f}{goal:>6}")


def make_state(millions: int) -> dict[str, Any]:
    width = 2500
    layers = [torch.nn.Linear(width, width) for _ in range(round(millions * 1e6 / width**2))]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-9)
    state = {"model": model, "optimizer": optimizer}
    update(state)
    return state


def update(state: dict[str, Any]) -> None:
    """A step of training without a model run: every array changes."""
    for parameter in state["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def arrays_of(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    for parameter, moments in state["optimizer"].state.items():
        yield parameter.detach()
        yield from moments.values()


def copy(tensors: list[torch.Tensor], buffers: list[Any]) -> None:
    for tensor, buffer in zip(tensors, buffers, strict=True):
        torch.from_numpy(buffer).view(tensor.dtype).view(tensor.shape).copy_(tensor)


def raw_write(path: Path, buffers: list[Any]) -> None:
    with path.open("wb", buffering=0) as file:
        for buffer in buffers:
            file.write(buffer.data)
        os.fsync(file.fileno())


def quiet() -> everstep.Checkpoints:
    return everstep.Checkpoints(Never(), keep_last=1)


def wait_for(run: Path, name: str) -> float:
    """The time at which a checkpoint has its name."""
    target = run / "checkpoints" / name
    while not target.exists():
        time.sleep(0.0005)
    return time.perf_counter()


def timed(action: Any) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def resident() -> int:
    """Bytes of memory that the process has in use."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    if (
        "MALLOC_MMAP_THRESHOLD_" not in os.environ
    ):  # what is freed is given back, so that memory can be read off
        fixed = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
        os.execve(sys.executable, [sys.executable, *sys.argv], fixed)
    main()
