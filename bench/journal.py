"""How fast metrics become durable in the journal, and what a scalar weighs.

    python bench/journal.py [--steps 20000] [--metrics 10]

First through a TrainLoop: every step collects its metrics as floats; the clock runs until the block is
left and all rows are fsynced (the last checkpoint included), and CPU time counts all threads.  Then the
journal alone, given whole columns as the collector gives them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import everstep
from everstep import Never
from everstep.record import Block, Journal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--metrics", type=int, default=10, help="collected in a step")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"{'':44}{'':>12}{'goal':>10}")
    runs = [through_a_loop(options.steps, options.metrics) for _ in range(options.repeats)]
    seconds, cpu, size, calls, turns = sorted(runs)[len(runs) // 2]
    scalars = options.steps * options.metrics
    calls, turns = ([t / 1000 for t in times] for times in (calls, turns))
    row("a call per metric, p50, us", percentile(calls, 50) / options.metrics, "1")
    row("a call, p99, us", percentile(calls, 99), "20")
    row("a call, longest, us", max(calls), "1000")
    row("from one step to the next, p99, us", percentile(turns, 99), "")
    row("from one step to the next, longest, us", max(turns), "")
    row("scalars a second until durable", scalars / seconds, "500000")
    row("CPU a scalar, us", cpu / scalars * 1e6, "")
    row("bytes a scalar", size / scalars, "24")
    alone = [journal_alone(options.steps, options.metrics) for _ in range(options.repeats)]
    row("the journal alone, scalars a second", scalars / statistics.median(alone), "")


def row(name: str, value: float, goal: str) -> None:
    print(f"{name:44}{value:12,.2f}{goal:>10}")


def percentile(values: list[float], part: int) -> float:
    return statistics.quantiles(values, n=100)[part - 1]


def through_a_loop(steps: int, metrics: int) -> tuple[float, float, int, list[int], list[int]]:
    """(seconds, CPU seconds, bytes of the journal, times of calls, times of turns) in ns."""
    names = [f"metric{i}" for i in range(metrics)]
    values = np.random.default_rng(0).standard_normal((1000, metrics)).tolist()
    rows = [dict(zip(names, each, strict=True)) for each in values]
    clock = time.perf_counter_ns
    calls, turns = [], []
    after = 0
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        quiet = [everstep.Checkpoints(Never())]
        arguments = {"max_epoch": 1, "max_step": steps, "services": quiet, "default_services": False}
        with everstep.TrainLoop(run, {"w": np.zeros(1)}, **arguments) as loop:
            for _epoch in loop.iter_epochs():
                for step in loop.iter_steps():
                    if step == 1:
                        began, cpu = time.perf_counter(), time.process_time()
                    else:
                        turns.append(clock() - after)
                    before = clock()
                    loop.collect_metrics(rows[step % 1000])
                    after = clock()
                    calls.append(after - before)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        size = sum(os.path.getsize(path) for path in (run / "journal").iterdir())
    return seconds, cpu, size, calls, turns


def journal_alone(steps: int, metrics: int) -> float:
    """Seconds to make so many rows durable, in blocks of 1,000 steps."""
    values = np.random.default_rng(0).standard_normal(1000).tolist()
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal.open(Path(folder), 1, None, {})
        began = time.perf_counter()
        for start in range(0, steps, 1000):
            numbers = list(range(start + 1, start + 1001))
            for metric in range(metrics):
                name = f"metric{metric}"
                journal.append(Block(1, "step", name, False, numbers, values, [1] * 1000, [0] * 1000))
        journal.sync()
        seconds = time.perf_counter() - began
        journal.close()
    return seconds


if __name__ == "__main__":
    main()
