"""What everstep adds to the start of a process.

    python bench/startup.py [--repeats 7]

Each figure is a process of its own, taking turns with the bare ones: CPU time and peak memory as the
system counts them, so that neighbours on the machine matter little.  "First step" ends after one step of
a small model (torch, one thread) with the default services on, step-0 checkpoint included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

BARE = """
import torch
torch.set_num_threads(1)
model = torch.nn.Linear(32, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    optimizer.zero_grad()
    model(torch.rand(8, 32)).mean().backward()
    optimizer.step()
"""
LOOP = """
import everstep, sys
state = {"model": model, "optimizer": optimizer}
with everstep.TrainLoop(sys.argv[1], state, max_step=1, max_epoch=1) as loop:
    for _epoch in loop.iter_epochs():
        for _step in loop.iter_steps():
            step()
            loop.collect_metrics(loss=0.5)
"""
PROGRAMS = {
    "an empty program": "pass",
    "import everstep": "import everstep",
    "import everstep, TrainLoop": "import everstep; everstep.TrainLoop",
    "import numpy": "import numpy",
    "bare first step": BARE + "step()",
    "first step in a TrainLoop": BARE + LOOP,
}
"""What is measured."""
ADDED = [
    ("import everstep", "an empty program", "0.1 s"),
    ("import everstep, TrainLoop", "import numpy", ""),
    ("first step in a TrainLoop", "bare first step", "0.2 s, 15 MB"),
]
"""What is added by which program over which, and the goal."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in PROGRAMS}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(repeats + 1):
            for name, program in PROGRAMS.items():
                figures = run(program, Path(folder) / f"{repeat}")
                if repeat:  # the first round warms the caches of the disk
                    found[name].append(figures)
    print(f"{'':60}{'CPU s':>8}{'MB':>8}  goal")
    for name, figures in found.items():
        print(f"{name:60}{median(figures, 0):8.3f}{median(figures, 1):8.1f}")
    for name, base, goal in ADDED:
        seconds, megabytes = (median(found[name], i) - median(found[base], i) for i in (0, 1))
        print(f"{f'{name}, over {base}':60}{seconds:8.3f}{megabytes:8.1f}  {goal}")


def run(program: str, run_dir: Path) -> tuple[float, float]:
    """CPU seconds and megabytes of memory at its peak."""
    silent = os.open(os.devnull, os.O_WRONLY)
    child = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", program, str(run_dir)],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, silent, 1)],
    )
    os.close(silent)
    _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit(f"this program failed:\n{program}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def median(figures: list[tuple[float, float]], index: int) -> float:
    return statistics.median(each[index] for each in figures)


if __name__ == "__main__":
    main()
