"""What the trail and its digests cost a step of the demo: CPU time, the same steps with and without.

    python bench/trail.py [--repeats 40] [--steps 100]

The demo's network and batches (32 images of 8x8) on one pinned core with one thread.  Runs with and without
alternate; the figure is the median of the differences of neighbouring ones.  The second line is the cost of
the calls alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from figures import Figure, Table, program
from torch.nn.functional import cross_entropy

import everstep
from everstep.supervisor.checks.verification import Verifier
from everstep.supervisor.streams.run_stream import RunStream

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from digits import network


def measure(options: argparse.Namespace) -> Iterator[Table]:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    keeping, without = compared(options.repeats, options.steps)
    figures = [
        Figure("a step of the demo with the trail, over one without", "us", keeping, without, 1.01),
        Figure("the calls alone", "us", calls_alone(20_000)),
    ]
    yield Table("What a resume compares", "CPU time of a step; digests of batches and losses.", figures)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--steps", type=int, default=100, help="steps in a block")


def compared(repeats: int, steps: int) -> tuple[list[float], list[float]]:
    """Microseconds of a step: (with the trail, without), which alternate."""
    keeping, without = [], []
    for number in range(repeats):
        order = (False, True) if number % 2 else (True, False)
        times = {keeps: step_time(keeps, steps) for keeps in order}
        keeping.append(times[True])
        without.append(times[False])
    return keeping, without


def step_time(keeps: bool, steps: int) -> float:
    """Microseconds of CPU time of a step in a run of its own."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with switched(keeps), loop({"model": model, "optimizer": optimizer}, steps + 10) as run:
        began = 0
        for _ in run.iter_epochs():
            for step, (x, y) in run.iter_steps(batches(), "train"):
                if step == 10:
                    began = time.process_time_ns()
                loss = cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.collect_metrics(loss=loss)
        return (time.process_time_ns() - began) / steps / 1000


def batches() -> list[Any]:
    return [(torch.randn(32, 1, 8, 8), torch.randint(0, 10, (32,))) for _ in range(500)]


@contextmanager
def loop(state: dict[str, Any], steps: int) -> Iterator[everstep.TrainLoop]:
    with tempfile.TemporaryDirectory() as folder:
        services = [everstep.Checkpoints(everstep.Never()), everstep.services.Console(sink=lambda line: None)]
        with everstep.TrainLoop(
            f"{folder}/run", state, max_step=steps, services=services, default_services=False
        ) as run:
            yield run


@contextmanager
def switched(keeps: bool) -> Iterator[None]:
    """Without: the calls of a step do nothing."""
    kept = Verifier.note_batch, Verifier.step_done
    if not keeps:
        Verifier.note_batch = Verifier.step_done = lambda *_: None  # type: ignore[method-assign,assignment]
    yield
    Verifier.note_batch, Verifier.step_done = kept  # type: ignore[method-assign]


def calls_alone(steps: int) -> list[float]:
    """Microseconds of what a step calls, in a loop that does nothing else."""
    found = []
    with loop({"w": torch.zeros(1)}, 10) as run:
        verifier: Any = run._engine.verifier
        stream = RunStream("train", run._engine.streams)
        verifier._streams = {"train": stream}
        several = cycle(batches()[:64])
        for _ in range(5):
            began = time.process_time_ns()
            for step in range(1, steps + 1):
                verifier.note_batch(step, "train", 0, next(several))
                run._engine.collector.pending[:] = [(step, "loss", 0.5)]
                verifier.step_done(step, 1)
            found.append((time.process_time_ns() - began) / steps / 1000)
            run._engine.collector.pending.clear()
            stream.ledger.drawn.clear()
            verifier._trail.copied(steps)
    return found


if __name__ == "__main__":
    program(__doc__, measure, add_arguments)
