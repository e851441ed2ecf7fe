"""What grows with a run: the cost of a step, memory, and the start of a run with a long past.

    python bench/growth.py [--steps 1000000] [--segments 5000] [--rows 1000000] [--repeats 5]

A long run: an empty body with a metric each step, saves every 10,000 steps and the index on; CPU time of a
step and memory at each power of ten.  Long pasts: a run that was killed after a save gets the journal of so
many starts that came to nothing, or of one that wrote so many rows; then a process resumes it for one step.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, Table, ask, program, resident

import everstep
from everstep.record import Block, Journal, Position

RESUMED = """
import json, os, resource, sys, time
import numpy as np
import everstep
everstep.TrainLoop
began = time.perf_counter()
with everstep.TrainLoop(sys.argv[1], {"w": np.zeros(3)}, max_step=3, max_epoch=1) as loop:
    entered = time.perf_counter() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([entered, memory]), flush=True)
    os._exit(0)
"""
KILLED = """
import os, sys
import numpy as np
import everstep
with everstep.TrainLoop(sys.argv[1], {"w": np.zeros(3)}, max_step=3, max_epoch=1) as loop:
    for _ in loop.iter_epochs():
        for step in loop.iter_steps():
            loop.collect_metrics(loss=0.5)
            while step == 2:
                if os.path.exists(sys.argv[1] + "/checkpoints/step-00000001"):
                    os._exit(9)
            loop.make_checkpoint()
"""


def measure(options: argparse.Namespace) -> Iterator[Table]:
    if options.one:
        print(json.dumps(long_run(Path(options.one), options.steps)))
        sys.exit()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        command = [sys.executable, __file__, "--one", str(folder / "long"), "--steps", str(options.steps)]
        figures = []
        for steps, microseconds, megabytes in ask(command):
            figures.append(Figure(f"a step, up to step {steps:,}", "us", [microseconds]))
            figures.append(Figure(f"memory at step {steps:,}", "MB", [megabytes]))
        yield Table("A long run", "CPU time of all threads for a step; an empty body, a metric.", figures)

        figures = []
        pasts = {
            "no past": (many_starts, 0),
            f"{options.segments:,} starts": (many_starts, options.segments),
            f"{options.rows:,} rows that were superseded": (many_rows, options.rows),
        }
        for name, (add, count) in pasts.items():
            run = folder / name.replace(" ", "-")
            subprocess.run([sys.executable, "-c", KILLED, str(run)], stdout=subprocess.DEVNULL)
            add(run, count)
            times, memory = [], []
            for number in range(options.repeats):
                copied = folder / f"copied-{number}"
                shutil.copytree(run, copied)
                entered, megabytes = ask([sys.executable, "-c", RESUMED, str(copied)], EVERSTEP_INDEX="off")
                times.append(entered * 1e3)
                memory.append(megabytes)
                shutil.rmtree(copied)
            figures.append(Figure(f"{name}: entered", "ms", times, goal=200))
            figures.append(Figure(f"{name}: largest memory", "MB", memory))
        how = "Wall time from TrainLoop(...) to the body of its `with` block, and memory of the process."
        yield Table("A start with a long past", how, figures)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--segments", type=int, default=5000)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", help=argparse.SUPPRESS)


def long_run(run: Path, steps: int) -> list[tuple[int, float, float]]:
    """(steps, microseconds of CPU a step since the last row, megabytes in use) at each power of ten."""
    marks = [10**power for power in range(3, 10) if 10**power <= steps]
    found = list[tuple[int, float, float]]()
    began, before = time.process_time(), 0
    services: Any = [
        everstep.Checkpoints(everstep.Every(steps=10_000)),
        everstep.services.Console(sink=lambda line: None),
    ]
    with everstep.TrainLoop(
        run, {"w": np.zeros(3)}, max_step=marks[-1], services=services, default_services=False
    ) as loop:
        for _ in loop.iter_epochs():
            for step in loop.iter_steps():
                if step == marks[len(found)]:
                    now = time.process_time()
                    found.append((step, (now - began) / (step - before) * 1e6, resident() / 1e6))
                    began, before = now, step
                loop.collect_metrics(loss=0.5)
    return found


def many_starts(run: Path, count: int) -> None:
    """Starts that resumed from the run's checkpoint and ended without one of their own."""
    parent = saved(run)
    for number in range(2, count + 2):
        journal = Journal.open(run, number, parent, {})
        journal.append(Block(1, "step", "loss", False, [2], [0.5], [1], [0]))
        journal.event("closed", {"status": "stopped", "reason": "made", "step": 2})
        journal.close()


def many_rows(run: Path, count: int) -> None:
    """One start of so many rows after the run's checkpoint."""
    journal = Journal.open(run, 2, saved(run), {})
    for at in range(0, count, 1000):
        steps = list(range(at + 2, at + 1002))
        journal.append(Block(1, "step", "loss", False, steps, [0.5] * 1000, [1] * 1000, [0] * 1000))
        journal.flush()
    journal.close()


def saved(run: Path) -> Position:
    """Where the journal stood at the run's last checkpoint."""
    manifest = json.loads((run / "checkpoints" / "step-00000001" / "manifest.json").read_text())
    body = manifest["body"]
    meta = (body if isinstance(body, dict) else json.loads(body))["meta"]
    return Position(*(meta if isinstance(meta, dict) else json.loads(meta))["journal"])


if __name__ == "__main__":
    program(__doc__, measure, add_arguments)
