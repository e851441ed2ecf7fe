"""How fast metrics become durable, and what a scalar weighs.

    python bench/metrics.py [--steps 20000] [--metrics 10] [--peers PYTHON]

Through a TrainLoop: every step collects its metrics as floats; the clock runs until the block is left and
all rows are fsynced (the last checkpoint included), with the index or without.  Then the journal alone, given
whole columns as the collector gives them, and the same scalars into SQLite, TensorBoard and MLflow.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from figures import Figure, Table, ask, program

import everstep
from everstep import Never
from everstep.record import Block, Journal


def measure(options: argparse.Namespace) -> Iterator[Table]:
    if options.one:
        mlflow(options.steps, options.metrics)
    scalars = options.steps * options.metrics
    runs = [through_a_loop(options.steps, options.metrics, indexed=False) for _ in range(options.repeats)]
    shipped = [through_a_loop(options.steps, options.metrics, indexed=True) for _ in range(options.repeats)]
    alone = [journal_alone(options.steps, options.metrics) for _ in range(options.repeats)]
    sqlite = [raw_sqlite(options.steps, options.metrics) for _ in range(options.repeats)]
    figures = [
        Figure(
            "a call, for each metric, p50",
            "us",
            [percentile(run.calls, 50) / options.metrics for run in runs],
            goal=1,
        ),
        Figure("a call, p99", "us", [percentile(run.calls, 99) for run in runs], goal=20),
        Figure("a call, longest", "us", [max(run.calls) / 1000 for run in runs], goal=1000),
        Figure("from one step to the next, p99", "us", [percentile(run.turns, 99) for run in runs]),
        Figure(
            "from one step to the next, longest", "us", [max(run.turns) / 1000 for run in runs], goal=1000
        ),
        Figure("scalars until durable", "/s", [scalars / run.seconds for run in runs], goal=500_000),
        Figure("scalars until durable and in the index", "/s", [scalars / run.seconds for run in shipped]),
        Figure("CPU of a scalar, all threads", "us", [run.cpu / scalars * 1e6 for run in runs]),
        Figure("a scalar in the journal", "bytes", [run.size / scalars for run in runs], goal=24),
        Figure("the journal alone: scalars until durable", "/s", [scalars / each for each in alone]),
        Figure("SQLite by hand, 100 rows a transaction", "/s", [scalars / each for each in sqlite]),
        Figure(
            "TensorBoard's SummaryWriter",
            "/s",
            [scalars / 10 / summary_writer(options.steps // 10, options.metrics) for _ in range(3)],
        ),
    ]
    if options.peers:
        command = [
            options.peers,
            __file__,
            "--one",
            "mlflow",
            "--steps",
            "200",
            "--metrics",
            str(options.metrics),
        ]
        seconds = ask(command)
        figures.append(Figure("MLflow, SQLite, a call each step", "/s", [200 * options.metrics / seconds]))
    how = (
        f"{options.steps:,} steps of {options.metrics} metrics. A call does no I/O; what makes it long is "
        "another thread that has the interpreter, or the core."
    )
    yield Table("Metrics", how, figures)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--metrics", type=int, default=10, help="collected in a step")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers", metavar="PYTHON", help="an interpreter that has bench/requirements.txt")
    parser.add_argument("--one", choices=("mlflow",), help=argparse.SUPPRESS)


class Logged(NamedTuple):
    """A run: seconds of wall time and of CPU, bytes of its journal, times in ns of calls and of steps."""

    seconds: float
    cpu: float
    size: int
    calls: list[int]
    turns: list[int]


def percentile(times: list[int], part: int) -> float:
    """In microseconds, of times in nanoseconds."""
    return statistics.quantiles(times, n=100)[part - 1] / 1000


def through_a_loop(steps: int, metrics: int, *, indexed: bool) -> Logged:
    """A run of its own."""
    os.environ["EVERSTEP_INDEX"] = "" if indexed else "off"
    names = [f"metric{i}" for i in range(metrics)]
    values = np.random.default_rng(0).standard_normal((1000, metrics)).tolist()
    rows = [dict(zip(names, each, strict=True)) for each in values]
    clock = time.perf_counter_ns
    calls, turns = [], []
    after = 0
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        quiet = [everstep.Checkpoints(Never())]
        given: dict[str, Any] = {"max_epoch": 1, "max_step": steps, "services": quiet}
        with everstep.TrainLoop(run, {"w": np.zeros(1)}, default_services=False, **given) as loop:
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
        size = sum(os.path.getsize(path) for path in (run / "journal").glob("*.evj"))
    return Logged(seconds, cpu, size, calls, turns)


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


def raw_sqlite(steps: int, metrics: int) -> float:
    """Seconds until so many rows are durable in a database that a person has written by hand."""
    names = [f"metric{i}" for i in range(metrics)]
    with tempfile.TemporaryDirectory() as folder:
        line = sqlite3.connect(f"{folder}/metrics.db", isolation_level=None)
        line.execute("PRAGMA journal_mode = WAL")
        line.execute("CREATE TABLE metrics (name TEXT, step INTEGER, value REAL)")
        began, rows = time.perf_counter(), list[tuple[str, int, float]]()
        for step in range(steps):
            rows += [(name, step, 0.5) for name in names]
            if len(rows) >= 100:
                line.execute("BEGIN")
                line.executemany("INSERT INTO metrics VALUES (?, ?, ?)", rows)
                line.execute("COMMIT")
                rows.clear()
        line.close()
        return time.perf_counter() - began


def summary_writer(steps: int, metrics: int) -> float:
    """Seconds until so many rows are in an event file."""
    from torch.utils.tensorboard.writer import SummaryWriter

    names = [f"metric{i}" for i in range(metrics)]
    with tempfile.TemporaryDirectory() as folder:
        writer, began = SummaryWriter(folder), time.perf_counter()
        for step in range(steps):
            for name in names:
                writer.add_scalar(name, 0.5, step)
        writer.close()
        return time.perf_counter() - began


def mlflow(steps: int, metrics: int) -> None:
    """Print the seconds until so many rows are in MLflow's own SQLite file; ends the process."""
    import mlflow

    values = {f"metric{i}": 0.5 for i in range(metrics)}
    with tempfile.TemporaryDirectory() as folder:
        mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        with mlflow.start_run():
            mlflow.log_metrics(values, step=0)  # makes the tables
            began = time.perf_counter()
            for step in range(1, steps + 1):
                mlflow.log_metrics(values, step=step)
        print(time.perf_counter() - began)
    sys.exit()


if __name__ == "__main__":
    program(__doc__, measure, add_arguments)
