"""What a quiet step and a saving boundary of everstep do, counted: a busy machine changes no number.

    python tests/cost_program.py             prints what is counted now
    python tests/cost_program.py --update    writes that into tests/cost.json, where test_cost.py finds it

Counted is what happens between the end of one step's body and the beginning of the next, in the training's
own thread, with a batch, a metric that lies on a device, and the default services.  Each number is the median
of several steps: no thread that comes in between changes it.

    python calls        everstep's functions that are entered
    clock readings      calls of the module time
    system calls        calls of C functions that ask the operating system: of os, fcntl, mmap, select, files
    thread waits        calls that may wait for another thread: locks that are acquired
    torch operations    as TorchDispatchMode sees them
    device waits        values that are brought from the device: item(), cpu(), tolist(), synchronize()
    blocks kept         of Python's allocator, more afterwards than before; the metric is a number here
    bytes at most       of Python's allocators, above what there was before
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import everstep

NUMBERS = Path(__file__).parent / "cost.json"
Counts = dict[str, int]
SRC = str(Path(everstep.__file__).parent)
SAVED, REPEATS = 12, 3
"""Steps between two checkpoints; boundaries that are counted for each number."""

ASKING = {"posix", "fcntl", "select", "_io", "mmap", "_socket", "_posixsubprocess"}
"""Modules in C whose functions and methods ask the operating system."""
HARMLESS = {"fspath", "getpid", "fsencode", "fsdecode", "_path_normpath", "cast", "release"}
"""Those that do not."""


@contextmanager
def calls(found: Counts) -> Iterator[None]:
    """Python calls, readings of the clock, system calls, waits for threads."""
    found |= dict.fromkeys(("python calls", "clock readings", "system calls", "thread waits"), 0)

    def see(frame: Any, event: str, function: Any) -> None:
        if event == "call":
            inside = frame.f_code.co_name.startswith("<") or not frame.f_code.co_filename.startswith(SRC)
            found["python calls"] += not inside
        elif event == "c_call":
            owner = getattr(function, "__self__", None)
            module = getattr(function, "__module__", None) or type(owner).__module__
            if module == "time":
                found["clock readings"] += 1
            elif module in ASKING and function.__name__ not in HARMLESS:
                found["system calls"] += 1
            elif module == "_thread" and function.__name__ in ("acquire", "__enter__"):
                found["thread waits"] += 1

    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextmanager
def operations(found: Counts) -> Iterator[None]:
    """Operations of torch, and waits for the device."""
    found |= {"torch operations": 0, "device waits": 0}
    before = Far.waits

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found["torch operations"] += 1
            return func(*args, **(kwargs or {}))

    with Mode():
        yield
    found["device waits"] = Far.waits - before


@contextmanager
def memory(found: Counts) -> Iterator[None]:
    """Allocations: those that stay, and the most at once."""
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        blocks, (used, _) = sys.getallocatedblocks(), tracemalloc.get_traced_memory()
        yield
        kept, (_, most) = sys.getallocatedblocks() - blocks, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    found |= {"blocks kept": kept, "bytes at most": most - used}


class Far(torch.Tensor):
    """A tensor on a device that knows how often somebody has waited for it."""

    waits = 0
    value: torch.Tensor

    @staticmethod
    def __new__(cls, value: torch.Tensor) -> Far:
        made: Far = torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device="cuda")
        made.value = value
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        to_host = str(kwargs.pop("device", "cuda")) == "cpu"
        result = func(*tree_map(_near, args), **tree_map(_near, kwargs))
        if to_host or not isinstance(result, torch.Tensor | tuple | list):  # a number, a truth
            wait()
            return result
        return tree_map(_far, result)

    def tolist(self) -> Any:
        wait()
        return self.value.tolist()


def wait() -> None:
    """As torch.cuda.synchronize."""
    Far.waits += 1


def _near(value: Any) -> Any:
    return value.value if isinstance(value, Far) else value


def _far(value: Any) -> Any:
    return Far(value) if isinstance(value, torch.Tensor) and not isinstance(value, Far) else value


class Watch(NamedTuple):
    """How something is counted, and what is done in each step and in each save meanwhile, which `shows`."""

    way: Callable[[Counts], AbstractContextManager[None]]
    plant: Callable[[Any], object] | None = None
    shows: str = ""


KEPT: list[Any] = []
READ = time.monotonic
PLANTS = {
    "item": Watch(operations, lambda value: value.item(), "device waits"),
    "copy": Watch(operations, lambda value: value.to("cpu"), "device waits"),
    "synchronize": Watch(operations, lambda value: torch.cuda.synchronize(), "device waits"),
    "operation": Watch(operations, lambda value: torch.zeros(()) + 1, "torch operations"),
    "clock": Watch(calls, lambda value: READ(), "clock readings"),
    "system call": Watch(calls, lambda value: os.stat("."), "system calls"),
    "call": Watch(
        calls, lambda value: [everstep.Every(steps=3).next_step(1) for _ in "0123456789"], "python calls"
    ),
    "allocation": Watch(memory, lambda value: bytearray(1 << 20), "bytes at most"),
    "leak": Watch(memory, lambda value: KEPT.append([object() for _ in range(1000)]), "blocks kept"),
}


def count(folder: Path, watches: Sequence[tuple[str, Watch]]) -> dict[str, dict[str, Counts]]:
    """By name, the median of each count, of a quiet step and of a boundary."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"model": model, "optimizer": optimizer}
    services = [
        everstep.Checkpoints(everstep.Every(steps=SAVED)),
        everstep.services.Console(sink=lambda line: None),
    ]
    repeated = [each for each in watches for _ in range(REPEATS)]
    saves = {(number + 3) * SAVED: each for number, each in enumerate(repeated)}
    numbers: dict[tuple[str, str, str], list[int]] = {}
    batches = torch.ones(max(saves) + 2, 4, 8).unbind()
    with everstep.TrainLoop(folder, state, services=services, max_epoch=1, seed=0) as loop:
        # metrics are read half-way, so that as many are left for each save, whenever the one before was done
        loop.on(
            everstep.services.Moment.AFTER_STEP, lambda boundary: None, every=everstep.Every(steps=SAVED // 2)
        )
        loop.on(everstep.services.Moment.AFTER_CHECKPOINT, lambda boundary: None)
        for _ in loop.iter_epochs():
            steps = loop.iter_steps(batches)
            for step, batch in steps:
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                since = step % SAVED
                if since == 1:
                    loop._engine.saver._writer.wait_idle()  # the loop hears of it before it counts
                name, watch = saves.get(step - since + SAVED * (since > 0), ("", None))
                if watch is None or since not in (0, 8, 10):
                    loop.collect_metrics(loss=loss.detach())
                    continue
                found: Counts = {}
                metric = loss.detach() if watch.way is memory else Far(loss.detach())
                with planted(watch.plant), watch.way(found):
                    loop.collect_metrics(loss=metric)
                    next(steps)
                for what, number in found.items():
                    numbers.setdefault((name, "quiet step" if since else "boundary", what), []).append(number)
    counted: dict[str, dict[str, Counts]] = {}
    for (name, where, what), each in numbers.items():
        counted.setdefault(name, {}).setdefault(where, {})[what] = median_low(each)
    return counted


@contextmanager
def planted(plant: Callable[[Any], object] | None) -> Iterator[None]:
    """Both `collect_metrics` and the service that asks for saves do one thing more."""
    collect, save = everstep.TrainLoop.collect_metrics, everstep.Checkpoints.run
    if plant is not None:
        everstep.TrainLoop.collect_metrics = lambda self, loss: (plant(loss), collect(self, loss=loss))[1]  # type: ignore
        everstep.Checkpoints.run = lambda self, boundary: (plant(ONE), save(self, boundary))[1]  # type: ignore
    try:
        yield
    finally:
        everstep.TrainLoop.collect_metrics, everstep.Checkpoints.run = collect, save  # type: ignore


ONE = Far(torch.ones(()))


def main() -> None:
    os.environ["EVERSTEP_INDEX"] = "off"
    torch.set_num_threads(1)
    torch.cuda.synchronize = wait
    gc.disable()  # its work depends on what the program did before
    watches = [("as it is", Watch(way)) for way in (calls, operations, memory)]
    if sys.argv[1:] == ["--plants"]:
        watches += PLANTS.items()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), tempfile.TemporaryDirectory() as folder:
        counted = count(Path(folder), watches)
    text = json.dumps(counted if sys.argv[1:] == ["--plants"] else counted["as it is"], indent=2)
    if sys.argv[1:] == ["--update"]:
        NUMBERS.write_text(f"{text}\n")
    print(text)


if __name__ == "__main__":
    main()
