"""How fast the index answers: 1,000 runs with 1,000 rows each, through the command and in the process.

    python bench/index.py [--runs 1000] [--rows 1000] [--repeats 7] [--index postgresql://USER@HOST/DATABASE]

With --index an empty database is filled instead of a file beside the runs.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from figures import Figure, Table, program

from everstep.index.database import Database
from everstep.index.filters import parse
from everstep.index.query import ask
from everstep.index.run_queries import find_run
from everstep.record import Block, Journal, RunDir


def make_run(folder: Path, number: int, rows: int) -> None:
    """A run of 10 metrics and `rows` rows, as a training of ten epochs would have written it."""
    run = RunDir.open(folder / f"run-{number:04d}", seed=number)
    journal = Journal.open(run.path, 1, None, {"config": {"lr": number / 1000}})
    per_block = rows // 100
    for epoch in range(1, 11):
        steps = list(range(epoch * per_block - per_block + 1, epoch * per_block + 1))
        for metric in range(9):
            values = [math.sin(number + step * metric) for step in steps]
            columns = (steps, values, [1] * per_block, [0] * per_block)
            journal.append(Block(epoch, "step", f"metric_{metric}", False, *columns))
        for seq in range(per_block):
            value = abs(math.sin(number)) / epoch
            journal.append(Block(epoch, "tail", "valid_loss", False, [steps[-1]], [value], [1], [seq]))
    journal.event("closed", {"status": "finished", "reason": "max_epoch 10 is reached"}, wall=True)
    journal.flush()
    journal.close()


def timed(action: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each call."""
    found = []
    for _ in range(repeats):
        begun = time.perf_counter()
        action()
        found.append(time.perf_counter() - begun)
    return found


def measure(options: argparse.Namespace) -> Iterator[Table]:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for number in range(options.runs):
            make_run(folder, number, options.rows)
        place: Path | str = options.index or folder / "everstep.db"
        figures: list[Figure] = []

        def figure(name: str, action: Callable[[], object], repeats: int, goal: float | None = None) -> None:
            times = [seconds * 1000 for seconds in timed(action, repeats)]
            figures.append(Figure(name, "ms", times, goal=goal))

        def everstep(*command: str) -> None:
            subprocess.run(
                [sys.executable, "-m", "everstep", *command, "--index", str(place)],
                check=True,
                capture_output=True,
                cwd=folder,
            )

        figure("everstep sync, from journals alone", lambda: everstep("sync"), 1)
        if isinstance(place, Path):
            figures.append(Figure("size of the index", "MB", [place.stat().st_size / 1e6]))
        repeats = options.repeats
        figure("everstep sync, nothing new", lambda: everstep("sync"), repeats)
        database = Database(place)
        if database.shared:  # what autovacuum does within a minute
            with database.write() as connection:
                connection.exec_driver_sql("ANALYZE")
        listing = ("runs", "valid_loss<0.03 status=finished", "--sort", "-valid_loss")
        wanted = '{"config.lr": {"$lt": 0.5}, "valid_loss": {"$lt": 0.03}}'
        where = ("runs", "--where", wanted, "--sort", "valid_loss")
        shown = ("show", "run-0001", "--metric", "metric_3", "--json")
        figure("everstep runs, all", lambda: everstep("runs"), repeats, 300)
        figure("everstep runs, filter and sort", lambda: everstep(*listing), repeats, 300)
        figure("everstep runs --where --sort", lambda: everstep(*where), repeats, 300)
        figure("everstep show RUN --metric NAME", lambda: everstep(*shown), repeats, 300)

        def one_metric() -> None:
            with database.read() as connection:
                name = find_run(connection, "run-0001")["name"]
            ask(database, "metrics", parse({"run": name, "name": "metric_3"}))

        figure("one metric of one run, in the process", one_metric, repeats, 50)
    how = (
        f"{options.runs:,} runs with {options.rows:,} rows each, in "
        f"{'PostgreSQL' if options.index else 'SQLite'}; commands are whole processes."
    )
    yield Table(f"The index{', PostgreSQL' if options.index else ''}", how, figures)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--index", help="an empty database: postgresql://USER@HOST/DATABASE")


if __name__ == "__main__":
    program(__doc__, measure, add_arguments)
