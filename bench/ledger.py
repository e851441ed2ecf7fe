"""What the ledger of `everstep audit` costs a step of the digits and of the transformer example: CPU time.

    python bench/ledger.py [--pairs 12] [--steps 90]

Two figures for each example, on one pinned core with one thread.  First, whole runs with and without the
ledger, which alternate: the median of the differences of neighbouring runs, noisy on a busy machine.  Second,
the ledger's own work alone: the list that a step adds to, and the account at each save, divided by the steps.
The digits save once a pass of 45 steps, the transformer every 30 steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from figures import Figure, Table, program
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import everstep
from everstep.contracts.data import WHOLE
from everstep.supervisor.streams.all_streams import Streams
from everstep.supervisor.streams.run_stream import Ledger

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import digits
import transformer


def measure(options: argparse.Namespace) -> Iterator[Table]:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    figures = []
    for name, (made, samples, batch, every) in EXAMPLES.items():
        keeping, without = compared(made, samples, batch, every, options.pairs, options.steps)
        figures.append(Figure(f"{name}: a step with the ledger, over one without", "us", keeping, without))
        bare = statistics.median(without)
        alone = work_alone(samples, batch, every)
        figures.append(Figure(f"{name}: the ledger's own work", "us", alone, goal=bare / 100))
    how = "CPU time of a step, saves included. The goal of the ledger's own work is a hundredth of the step."
    yield Table("The ledger", how, figures)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=90)


def digits_step() -> tuple[dict[str, Any], Callable[[Any], torch.Tensor], TensorDataset]:
    model = digits.network()
    data = TensorDataset(torch.randn(1437, 1, 8, 8), torch.randint(0, 10, (1437,)))
    return _step(model, data, lambda out, y: cross_entropy(out, y))


def transformer_step() -> tuple[dict[str, Any], Callable[[Any], torch.Tensor], TensorDataset]:
    size = transformer.SMALL
    model = transformer.Transformer(size)
    text = torch.randint(0, 256, (5000, size.context + 1))
    data = TensorDataset(text[:, :-1].clone(), text[:, 1:].clone())
    return _step(model, data, lambda out, y: cross_entropy(out.flatten(0, 1), y.flatten()))


def _step(
    model: torch.nn.Module, data: TensorDataset, loss_of: Callable[..., torch.Tensor]
) -> tuple[dict[str, Any], Callable[[Any], torch.Tensor], TensorDataset]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch: Any) -> torch.Tensor:
        x, y = batch
        loss: Any = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return torch.as_tensor(loss)

    return {"model": model, "optimizer": optimizer}, step, data


EXAMPLES = {"digits": (digits_step, 1437, 32, 45), "transformer": (transformer_step, 5000, 8, 30)}
"""Name -> how it is made, its samples, its batch size, its steps between two saves."""


def compared(
    made: Callable[[], Any], samples: int, batch: int, every: int, pairs: int, steps: int
) -> tuple[list[float], list[float]]:
    """Microseconds of a step: (with the ledger, without), which alternate."""
    keeping, without = [], []
    for number in range(pairs):
        order = (False, True) if number % 2 else (True, False)
        times = {keeps: step_time(keeps, made, batch, every, steps) for keeps in order}
        keeping.append(times[True])
        without.append(times[False])
    return keeping, without


def step_time(keeps: bool, made: Callable[[], Any], batch: int, every: int, steps: int) -> float:
    """Microseconds of CPU time of a step in a run of its own, saves included."""
    state, step_on, data = made()
    train = everstep.data.loader(data, batch, shuffle=True)
    services = [
        everstep.Checkpoints(everstep.Every(steps=every)),
        everstep.services.Console(sink=lambda line: None),
    ]
    with switched(keeps), tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        given: Any = {"max_step": steps + 10, "services": services, "default_services": False, "seed": 1}
        began = 0
        with everstep.TrainLoop(f"{folder}/run", state, **given) as loop:
            for _ in loop.iter_epochs():
                for step, one in loop.iter_steps(train):
                    if step == 10:
                        began = time.process_time_ns()
                    loop.collect_metrics(loss=step_on(one))
    return (time.process_time_ns() - began) / steps / 1000


@contextmanager
def switched(keeps: bool) -> Iterator[None]:
    """Without: nothing is accounted for, and nothing told; the list of a step is still there."""
    kept = Ledger.account_for, Streams.account
    if not keeps:
        Ledger.account_for = lambda self, cursor: self.drawn.clear()  # type: ignore[method-assign]
        Streams.account = lambda self: []  # type: ignore[method-assign]
    yield
    Ledger.account_for, Streams.account = kept  # type: ignore[method-assign]


def work_alone(samples: int, batch: int, every: int) -> list[float]:
    """Microseconds of CPU time that the ledger takes for a step, in each of several passes."""
    stream = everstep.data.arrays(torch.arange(samples), batch_size=batch, shuffle=True)
    found = []
    for _ in range(20):
        ledger, cursor, steps = Ledger("train", WHOLE), stream.open("train", 0, seed=1), 0
        drawn, began = ledger.drawn, time.process_time_ns()
        while steps < len(stream):
            more = min(every, len(stream) - steps)
            for digest in range(more):
                drawn.append(digest)
            steps += more
            cursor._handed_out = steps
            json.dumps(ledger.news(cursor, {}))
        ledger.end_pass(cursor)
        found.append((time.process_time_ns() - began) / steps / 1000)
    return found


if __name__ == "__main__":
    program(__doc__, measure, add_arguments)
