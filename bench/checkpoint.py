"""What a checkpoint costs on the CPU.

    python bench/checkpoint.py [--repeats 7] [--millions 50] [--only whole frozen memory live]

whole: 50 million parameters with Adam, 600 MB.  "Blocked" is the wall time from the end of a step to the
beginning of the next with a save between; "committed" the time until the checkpoint is written, hashed,
fsynced and renamed.  Copies, raw writes and saves take turns.  Neighbours on the machine lengthen wall time;
CPU time of the training thread tells less of them.
frozen: adapters over a frozen base of 120 million parameters.
memory: a replay memory of 1 GB of which 1 % is written between saves.
live: the largest memory with and without Checkpoints(copy=False).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import Figure, Table, ask, program, resident

import everstep
from everstep import Never


def measure(options: argparse.Namespace) -> Iterator[Table]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        folder = Path(made)
        if options.one:
            print(json.dumps(one_process(folder, options.millions, copy=options.one == "copied")))
            sys.exit()
        for name, table in TABLES.items():
            if name in options.only:
                yield table(folder / name, options)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--millions", type=int, default=50, help="parameters")
    parser.add_argument("--folder", help="on the disk to measure; default: the system's temporary one")
    parser.add_argument("--only", nargs="*", choices=TABLES, default=TABLES)
    parser.add_argument("--one", choices=("copied", "live"), help=argparse.SUPPRESS)


def memory(folder: Path, options: argparse.Namespace) -> Table:
    """Bytes written and time blocked by a save: of an array of 1 GB, and of a `RingBuffer`."""
    figures = []
    for kind in ("an array of 1 GB in state=", "data.RingBuffer of 1 GB"):
        blocked, wrote = replay(folder / kind, "array" in kind, options.repeats)
        figures.append(Figure(f"{kind}: blocked", "ms", [each * 1e3 for each in blocked[3:-2]]))
        figures.append(Figure(f"{kind}: written", "MB", [each / 1e6 for each in wrote[3:-2]]))
    how = "A replay memory of which 1 % changes between two saves, from the fourth save on."
    return Table("A checkpoint of a replay memory", how, figures)


def replay(run: Path, is_array: bool, repeats: int) -> tuple[list[float], list[float]]:
    """(seconds blocked, bytes written), of each save."""
    items, width = 1 << 18, 1024
    buffer = everstep.data.RingBuffer(items, {"x": ("float32", (width,))})
    whole = np.ones((items if is_array else 1, width), np.float32)
    block = np.ones((items // 100, width), np.float32)
    for _ in range(101):
        buffer.extend(x=block[: 1 if is_array else None])
    state: dict[str, Any] = {"memory": whole if is_array else buffer}
    blocked, wrote = [], []
    began = before = 0.0
    with everstep.TrainLoop(
        run, state, max_epoch=1, max_step=repeats + 4, default_services=False, services=[quiet()]
    ) as loop:
        for _epoch in loop.iter_epochs():
            for step in loop.iter_steps():
                if began > 0 and step - 1 <= repeats + 2:
                    blocked.append(time.perf_counter() - began)
                    wait_for(run, f"step-{step - 1:08d}")
                    time.sleep(1)  # what is older is deleted meanwhile
                    wrote.append(bytes_written() - before)
                block += 1
                if is_array:
                    whole[step * len(block) : (step + 1) * len(block)] = block
                else:
                    buffer.extend(x=block)
                if step <= repeats + 2:
                    loop.make_checkpoint()
                began, before = time.perf_counter(), bytes_written()
    return blocked, wrote


def bytes_written() -> int:
    """Bytes that this process has written."""
    return int(re.search(r"wchar: (\d+)", Path("/proc/self/io").read_text())[1])  # type: ignore[index]


def live(folder: Path, options: argparse.Namespace) -> Table:
    """Each way in a process of its own, whose memory is its own."""
    figures = []
    for how, name in (("copied", "Checkpoints()"), ("live", "Checkpoints(copy=False)")):
        command = [sys.executable, __file__, "--one", how, "--millions", str(options.millions)]
        most, blocked = ask([*command, *(["--folder", options.folder] if options.folder else [])])
        figures.append(Figure(f"{name}: memory beside the state", "MB", [most / 1e6]))
        figures.append(Figure(f"{name}: blocked", "ms", [each * 1e3 for each in blocked]))
    how = f"{options.millions} million parameters with Adam; the largest memory between steps of six saves."
    return Table("A checkpoint without a copy", how, figures)


def one_process(folder: Path, millions: int, *, copy: bool) -> tuple[int, list[float]]:
    """(bytes of memory beside the state at most, seconds blocked by each save) of a run with six saves."""
    state = make_state(millions)
    for parameter in state["model"].parameters():
        parameter.grad = torch.zeros_like(parameter)
    saves = everstep.Checkpoints(Never(), keep_last=1, copy=copy)
    before, largest, blocked, began = resident(), 0, [], 0.0
    with everstep.TrainLoop(
        folder / f"run-{copy}", state, max_epoch=1, max_step=6, default_services=False, services=[saves]
    ) as loop:
        for _epoch in loop.iter_epochs():
            for _step in loop.iter_steps():
                if began:
                    blocked.append(time.perf_counter() - began)
                largest = max(largest, resident())
                state["optimizer"].step()
                loop.make_checkpoint()
                began = time.perf_counter()
    return max(largest, resident()) - before, blocked


def whole(folder: Path, options: argparse.Namespace) -> Table:
    repeats = options.repeats
    folder.mkdir()
    state = make_state(options.millions)
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
    in_ms = {
        name: [each * 1e3 for each in found]
        for name, found in {"copies": copies, "blocked": blocked, "totals": totals, "writes": writes}.items()
    }
    cpu = [each * 1e3 for each in cpu_blocked], [each * 1e3 for each in cpu_copies]
    mine, other = resident(), size / 1e6
    figures = [
        Figure("one copy into kept buffers", "ms", in_ms["copies"]),
        Figure("blocked by a save, over one copy", "ms", in_ms["blocked"], in_ms["copies"], 1.15),
        Figure("blocked by the first save, over one copy", "ms", in_ms["blocked"][:1], in_ms["copies"], 1.15),
        Figure("CPU of the blocked thread, over that of one copy", "ms", *cpu, 1.15),
        Figure("raw write and fsync", "ms", in_ms["writes"]),
        Figure("until committed, over raw write and fsync", "ms", in_ms["totals"], in_ms["writes"], 1.3),
        Figure("memory beside the state, over the state", "MB", [(mine - before) / 1e6], [other], 1),
        *others(folder, state),
    ]
    how = f"{size / 1e6:.0f} MB in {len(tensors)} arrays: {options.millions} million parameters with Adam."
    return Table("A checkpoint", how, figures)


def others(folder: Path, state: dict[str, Any]) -> Iterator[Figure]:
    """The same state written by others, to the disk: the loop waits for these."""
    import safetensors.torch

    def kept() -> dict[str, Any]:
        return {"model": state["model"].state_dict(), "optimizer": state["optimizer"].state_dict()}

    def torch_save(path: Path) -> None:
        torch.save(kept(), path)

    def safetensors_save(path: Path) -> None:
        named = {str(number): tensor for number, tensor in enumerate(arrays_of(state))}
        safetensors.torch.save_file(named, path)

    for name, save in (("torch.save", torch_save), ("safetensors", safetensors_save)):
        times = []
        for number in range(3):
            path = folder / f"{name}-{number}"

            def durable(save: Any = save, path: Path = path) -> None:
                save(path)
                with path.open("rb+") as file:
                    os.fsync(file.fileno())

            times.append(timed(durable) * 1e3)
            path.unlink()
        yield Figure(f"{name} and fsync (neither hashed nor renamed)", "ms", times)


def frozen(folder: Path, options: argparse.Namespace) -> Table:
    """Save adapters of rank 8, whose frozen base `everstep.torch.trainable` leaves out, after each step."""
    width, millions = 2500, 120
    base = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(round(millions * 1e6 / width**2)))
    base.requires_grad_(False)
    adapters = torch.nn.ModuleList(torch.nn.Linear(width, 8) for _ in base)
    optimizer = torch.optim.Adam(adapters.parameters())
    model = torch.nn.ModuleDict({"base": base, "adapters": adapters})
    state = {"model": everstep.torch.trainable(model), "optimizer": optimizer}
    whole, trained = (sum(p.nbytes for p in part.parameters()) / 1e6 for part in (base, adapters))
    wrote, blocked, committed = [], [], []
    with everstep.TrainLoop(
        folder, state, max_epoch=1, max_step=6, default_services=False, services=[quiet()]
    ) as loop:
        for _epoch in loop.iter_epochs():
            saved_at, before = 0.0, 0
            for step in loop.iter_steps():
                if step == 1:
                    wait_for(folder, "epoch-0000-step-00000000")
                else:
                    blocked.append((time.perf_counter() - saved_at) * 1e3)
                    committed.append((wait_for(folder, f"step-{step - 1:08d}") - saved_at) * 1e3)
                    time.sleep(0.5)  # retention, too
                    wrote.append((bytes_written() - before) / 1e6)
                for parameter in adapters.parameters():
                    parameter.grad = torch.randn_like(parameter)
                optimizer.step()
                before = bytes_written()
                loop.make_checkpoint()
                saved_at = time.perf_counter()
    figures = [
        Figure("a save: written", "MB", wrote),
        Figure("a save: blocked", "ms", blocked),
        Figure("a save: until committed", "ms", committed),
    ]
    how = f"{whole:.0f} MB frozen, {trained:.1f} MB trained with Adam, and `trainable(model)` in state=."
    return Table("A checkpoint of adapters over a frozen base", how, figures)


def make_state(millions: int) -> dict[str, Any]:
    width = 2500
    layers = [torch.nn.Linear(width, width) for _ in range(round(millions * 1e6 / width**2))]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-9)
    state = {"model": model, "optimizer": optimizer}
    update(state)
    return state


def update(state: dict[str, Any]) -> None:
    """A step of training without a model run: every array changes, and no two are equal."""
    for number, parameter in enumerate(state["model"].parameters(), 1):
        parameter.grad = torch.full_like(parameter, number)
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


TABLES = {"whole": whole, "frozen": frozen, "memory": memory, "live": live}


if __name__ == "__main__":
    if (
        "MALLOC_MMAP_THRESHOLD_" not in os.environ
    ):  # what is freed is given back, so that memory can be read off
        fixed = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
        os.execve(sys.executable, [sys.executable, *sys.argv], fixed)
    program(__doc__, measure, add_arguments)
