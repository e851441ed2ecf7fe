"""How fast the index answers: 1,000 runs with 1,000 rows each, through the command and in the process.

    python bench/index.py [--runs 1000] [--rows 1000] [--repeats 5] [--index postgresql://USER@HOST/DATABASE]

With --index an empty database is filled instead of a file beside the runs.  Prints the seconds to make the
index from the journals (`everstep sync`), to list the runs with a filter and a sort (`everstep runs`, a
whole process, Python's start included), and to read one metric of one run.
Goals: list under 0.5 s, one metric under 50 ms.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from everstep.index.database import Database
from everstep.index.run_queries import find_run, metric_rows
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


def show(name: str, times: list[float], goal: str = "") -> None:
    """One line."""
    print(f"{name:52} median {median(times) * 1000:8.1f} ms  worst {max(times) * 1000:8.1f} ms  {goal}")


def main() -> None:
    """Make the runs, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--index")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for number in range(arguments.runs):
            make_run(folder, number, arguments.rows)
        print(f"{arguments.runs} runs, {arguments.runs * arguments.rows} rows")
        place: Path | str = arguments.index or folder / "everstep.db"
        index = ["--index", str(place)]

        def everstep(*command: str) -> None:
            subprocess.run(
                [sys.executable, "-m", "everstep", *command, *index],
                check=True,
                capture_output=True,
                cwd=folder,
            )

        show("everstep sync, from journals alone", timed(lambda: everstep("sync"), 1))
        if isinstance(place, Path):
            print(f"{'size of the index':52} {place.stat().st_size / 1e6:.1f} MB")
        repeats = arguments.repeats
        show("everstep sync, nothing new", timed(lambda: everstep("sync"), repeats))
        database = Database(place)
        if database.shared:  # what autovacuum does within a minute
            with database.write() as connection:
                connection.exec_driver_sql("ANALYZE")
        listing = ("runs", "valid_loss<0.03 status=finished", "--sort", "-valid_loss")
        show("everstep runs, filter and sort", timed(lambda: everstep(*listing), repeats), "goal 500 ms")
        where = (
            "--where",
            '{"config.lr": {"$lt": 0.5}, "valid_loss": {"$lt": 0.03}}',
            "--sort",
            "valid_loss",
        )
        show("everstep runs --where, --sort", timed(lambda: everstep("runs", *where), repeats), "goal 500 ms")
        show("everstep runs", timed(lambda: everstep("runs"), repeats))
        shown = ("show", "run-0500", "--metric", "metric_3", "--json")
        show("everstep show RUN --metric NAME", timed(lambda: everstep(*shown), repeats))

        def one_metric() -> None:
            with database.read() as connection:
                metric_rows(connection, int(find_run(connection, "run-0500")["id"]), "metric_3")

        show("one metric of one run, in the process", timed(one_metric, repeats), "goal 50 ms")


if __name__ == "__main__":
    main()
