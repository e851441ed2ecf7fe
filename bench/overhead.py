"""CPU time that everstep adds to a step, over a bare PyTorch loop in the same process.

    python bench/overhead.py [--repeats 300] [--steps 100]

A tiny MLP (32-32-1, batch 32, SGD) on one pinned core with one thread.  Blocks of bare and of everstep
steps alternate; the figure is the median of the differences of neighbouring blocks, in CPU time of all
threads.  "bare against bare" must come out near 0.  The second figure leaves the model out: an empty body
tells the cost of the library's own instructions, without torch's hooks and with warm caches.
"""

from __future__ import annotations

import argparse
import os
import pty
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

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks

import everstep
from everstep import Every, Never

Block = Callable[[int], None]
"""Runs so many steps."""
Body = Callable[[Any], Any]
"""One step on a batch; returns the loss."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--steps", type=int, default=100, help="steps in a block")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.pop("CI", None)  # the console is live for the person that we pretend to be
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    print(f"{'':34}{'bare us':>9}{'added us':>10}{'spread':>8}{'x bare':>8}{'empty body us':>15}{'goal':>7}")
    for name, (case, goal, scale) in CASES.items():
        repeats, steps = options.repeats // scale, options.steps * scale
        bare, added, spread, _ = compare(case, real_body(), repeats, steps)
        *_, least = compare(case, empty_body(), repeats, 4 * steps)
        ratio = (bare + added) / bare
        print(f"{name:34}{bare:9.1f}{added:10.2f}{spread:8.2f}{ratio:8.3f}{least:15.2f}{goal:>7}", flush=True)


def compare(case: Any, make_body: Any, repeats: int, steps: int) -> tuple[float, float, float, float]:
    """(bare, added, quartile range of added, least added) in microseconds a step."""
    bare_times, differences = [], []
    with tempfile.TemporaryDirectory() as folder, quiet():
        bare = without_hooks(bare_block(make_body()))
        with case(Path(folder) / "run", make_body()) as block:
            bare(steps), block(steps)
            for repeat in range(repeats):
                pair = [(bare, 0), (block, 1)]
                times = [0.0, 0.0]
                for run, index in pair if repeat % 2 else pair[::-1]:
                    began = time.process_time_ns()
                    run(steps)
                    times[index] = (time.process_time_ns() - began) / steps / 1000
                bare_times.append(times[0])
                differences.append(times[1] - times[0])
    low, _, high = statistics.quantiles(differences, n=4)
    return statistics.median(bare_times), statistics.median(differences), high - low, low


def without_hooks(block: Block) -> Block:
    """A bare loop has no hook on its optimizer; while an everstep loop is open, every optimizer has."""

    def run(steps: int) -> None:
        kept = dict(hooks)
        hooks.clear()
        block(steps)
        hooks.update(kept)

    return run


@contextmanager
def quiet() -> Iterator[None]:
    """Standard output becomes a terminal that somebody else reads, so that the console is live."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(["cat"], stdin=ours, stdout=subprocess.DEVNULL) as reader:
        before = sys.stdout
        with os.fdopen(theirs, "w") as sys.stdout:
            try:
                yield
            finally:
                sys.stdout = before
                reader.kill()
        os.close(ours)


# ------------------------------------------------------------------------------------ the bodies


class Model:
    """The state, the batches and the step."""

    def __init__(self, body: Callable[[Model, Any], Any]) -> None:
        torch.manual_seed(0)
        self.module = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)
        self.batches = [(torch.rand(32, 32), torch.rand(32, 1)) for _ in range(50)]
        self.state = {"model": self.module, "optimizer": self.optimizer}
        if body is not Model.train:
            del self.state["optimizer"]  # one that never steps would be an error
        self.body = body
        self.loss = self.train(self.batches[0])

    def step(self, batch: Any) -> Any:
        return self.body(self, batch)

    def train(self, batch: Any) -> Any:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.module(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


def real_body() -> Callable[[], Model]:
    return lambda: Model(Model.train)


def empty_body() -> Callable[[], Model]:
    return lambda: Model(lambda model, batch: model.loss)


class Batches:
    """An endless stream of ready batches, the same object on both sides: data costs what it costs anyway."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        return Cursor(self.batches, position or 0)


class Cursor:
    def __init__(self, batches: list[Any], done: int = 0) -> None:
        self.done = done  # the position is true: a start tries it out
        self.source = islice(cycle(batches), done % len(batches), None)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.done += 1
        return next(self.source)

    def position(self) -> int:
        return self.done

    def remaining(self) -> None:
        return None

    def close(self) -> None:
        pass


# ------------------------------------------------------------------------------------- the cases


def bare_block(model: Model) -> Block:
    source, step = Cursor(model.batches), model.step

    def run(steps: int) -> None:
        for batch in islice(source, steps):
            step(batch)

    return run


@contextmanager
def bare(run_dir: Path, model: Model) -> Iterator[Block]:
    yield bare_block(model)


@contextmanager
def train_loop(run_dir: Path, model: Model, collect: bool, **arguments: Any) -> Iterator[Block]:
    with everstep.TrainLoop(run_dir, model.state, **arguments) as loop:
        for _epoch in loop.iter_epochs():
            steps = loop.iter_steps(Batches(model.batches))
            yield (collecting_block if collect else plain_block)(loop, steps, model.step)
            loop.request_stop("measured")
            next(steps, None)


def plain_block(loop: everstep.TrainLoop, steps: Iterator[Any], step: Body) -> Block:
    def run(count: int) -> None:
        for _, batch in islice(steps, count):
            step(batch)

    return run


def collecting_block(loop: everstep.TrainLoop, steps: Iterator[Any], step: Body) -> Block:
    def run(count: int) -> None:
        for _, batch in islice(steps, count):
            loop.collect_metrics(loss=step(batch))

    return run


@contextmanager
def supervisor(run_dir: Path, model: Model, collect: bool) -> Iterator[Block]:
    arguments: dict[str, Any] = {"default_services": False, "services": [everstep.Checkpoints(Never())]}
    with everstep.Supervisor(run_dir, model.state, **arguments) as sv:
        batches, step = sv.stream(Batches(model.batches)), model.step
        sv.should_stop()

        def run(count: int) -> None:
            for _ in range(count):
                if sv.should_stop():
                    break
                step(next(batches))
                sv.advance()

        def run_collecting(count: int) -> None:
            for _ in range(count):
                if sv.should_stop():
                    break
                sv.advance(loss=step(next(batches)))

        yield run_collecting if collect else run


def nothing_due(run_dir: Path, model: Model) -> Any:
    services = [everstep.Checkpoints(Never())]
    return train_loop(run_dir, model, False, default_services=False, services=services)


def one_metric(run_dir: Path, model: Model) -> Any:
    services = [everstep.Checkpoints(Never())]
    return train_loop(run_dir, model, True, default_services=False, services=services)


def all_services(run_dir: Path, model: Model) -> Any:
    services = [everstep.Checkpoints(Every(steps=1000)), everstep.EarlyStop("loss", patience=9)]
    return train_loop(run_dir, model, True, services=services)


CASES: dict[str, tuple[Any, str, int]] = {
    "bare against bare": (bare, "0", 1),
    "TrainLoop, nothing due": (nothing_due, "1", 1),
    "TrainLoop, one metric a step": (one_metric, "3", 1),
    "TrainLoop, all default services": (all_services, "10", 10),  # a save in each block
    "Supervisor": (lambda run_dir, model: supervisor(run_dir, model, False), "", 1),
    "Supervisor, one metric a step": (lambda run_dir, model: supervisor(run_dir, model, True), "", 1),
}
"""Name: the case, its goal in microseconds, how much longer its blocks are."""


if __name__ == "__main__":
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:  # else giving memory back costs page faults every step
        fixed = {
            "TERM": "xterm",
            "MALLOC_TRIM_THRESHOLD_": "1000000000",
            "MALLOC_MMAP_THRESHOLD_": "1000000000",
        }
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **fixed})
    main()
