"""CPU time that everstep adds to a step, over a bare PyTorch loop in the same process.

    python bench/overhead.py [--repeats 40] [--steps 500]

A tiny MLP (32-32-1, batch 32, SGD) on one pinned core with one thread.  Blocks of bare and of everstep
steps alternate; the figure is the median of the differences of neighbouring blocks, in CPU time of all
threads.  "bare against bare" must come out near 0.  The second figure leaves the model out: an empty body
tells the library's own cost more precisely, without its effect on the caches of a real step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import everstep
from everstep import Every, Never

Block = Callable[[int], None]
"""Runs so many steps."""
Body = Callable[[Any], Any]
"""One step on a batch; returns the loss."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--steps", type=int, default=500, help="steps in a block")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    print(f"{'':34}{'bare us':>9}{'added us':>10}{'spread':>8}{'x bare':>8}{'empty body us':>15}{'goal':>7}")
    for name, (case, goal) in CASES.items():
        bare, added, spread, _ = compare(case, real_body(), options.repeats, options.steps)
        *_, least = compare(case, empty_body(), options.repeats, 4 * options.steps)
        ratio = (bare + added) / bare
        print(f"{name:34}{bare:9.1f}{added:10.2f}{spread:8.2f}{ratio:8.3f}{least:15.2f}{goal:>7}", flush=True)


def compare(case: Any, make_body: Any, repeats: int, steps: int) -> tuple[float, float, float, float]:
    """(bare, added, quartile range of added, least added) in microseconds a step."""
    bare_times, differences = [], []
    with tempfile.TemporaryDirectory() as folder, quiet():
        bare = bare_block(make_body())
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


@contextmanager
def quiet() -> Iterator[None]:
    """Standard output becomes a terminal that somebody else reads, so that the console is live."""
    import pty

    ours, theirs = pty.openpty()
    with subprocess.Popen(["cat"], stdin=ours, stdout=subprocess.DEVNULL) as reader:
        before = sys.stdout
        with os.fdopen(theirs, "w") as sys.stdout:
            try:
                yield
            finally:
                sys.stdout = before
        os.close(ours)
        reader.kill()


# ------------------------------------------------------------------------------------ the bodies


class Model:
    """The state, the batches and the step."""

    def __init__(self, body: Callable[[Model, Any], Any]) -> None:
        torch.manual_seed(0)
        self.module = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)
        self.batches = [(torch.rand(32, 32), torch.rand(32, 1)) for _ in range(50)]
        self.state = {"model": self.module, "optimizer": self.optimizer}
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
    """An endless stream of ready batches, so that data costs nothing on either side."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Batches:
        self.source = forever(self.batches)
        self.__next__ = self.source.__next__
        return self

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.source)

    def position(self) -> int:
        return 0

    def remaining(self) -> None:
        return None

    def close(self) -> None:
        pass


def forever(batches: list[Any]) -> Iterator[Any]:
    while True:
        yield from batches


# ------------------------------------------------------------------------------------- the cases


def bare_block(model: Model) -> Block:
    source, step = forever(model.batches), model.step

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
            steps, step = loop.iter_steps(Batches(model.batches)), model.step

            def run(count: int) -> None:
                for _, batch in islice(steps, count):
                    step(batch)

            def run_collecting(count: int) -> None:
                for _, batch in islice(steps, count):
                    loop.collect_metrics(loss=step(batch))

            yield run_collecting if collect else run
            loop.request_stop("measured")
            next(steps, None)


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


CASES: dict[str, tuple[Any, str]] = {
    "bare against bare": (bare, "0"),
    "TrainLoop, nothing due": (nothing_due, "1"),
    "TrainLoop, one metric a step": (one_metric, "3"),
    "TrainLoop, all default services": (all_services, "10"),
    "Supervisor": (lambda run_dir, model: supervisor(run_dir, model, False), ""),
    "Supervisor, one metric a step": (lambda run_dir, model: supervisor(run_dir, model, True), ""),
}


if __name__ == "__main__":
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:  # else giving memory back costs page faults every step
        fixed = {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **fixed})
    main()
