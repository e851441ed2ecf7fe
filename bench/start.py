"""What everstep adds to the start of a process, and how long its commands take.

    python bench/start.py [--repeats 9] [--peers PYTHON]

Each value is a process of its own, taking turns with the others: CPU time and largest memory as the system
counts them, so that neighbours on the machine matter little.  "First step" ends after one step of a small
model (torch, one thread); everstep's has the default services on, and its step-0 checkpoint is included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator

from figures import Figure, Table, program

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
IGNITE = """
from ignite.engine import Engine
Engine(lambda engine, batch: step()).run([0], max_epochs=1)
"""
LIGHTNING = """
import lightning, logging
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model
    def training_step(self, batch, index):
        return self.net(torch.rand(8, 32)).mean()
    def configure_optimizers(self):
        return optimizer
lightning.Trainer(max_steps=1, accelerator="cpu", devices=1, default_root_dir=sys.argv[1],
                  enable_progress_bar=False).fit(Module(), [0])
"""
PROGRAMS = {
    "an empty program": ["-c", "pass"],
    "import click": ["-c", "import click"],
    "import numpy": ["-c", "import numpy"],
    "import everstep": ["-c", "import everstep"],
    "import everstep, TrainLoop": ["-c", "import everstep; everstep.TrainLoop"],
    "everstep --help": ["-m", "everstep", "--help"],
    "everstep runs --help": ["-m", "everstep", "runs", "--help"],
    "everstep show --help": ["-m", "everstep", "show", "--help"],
    "bare first step": ["-c", BARE + "step()"],
    "first step in a TrainLoop": ["-c", BARE + LOOP],
}
"""What is measured: arguments of Python."""
PEERS = {
    "bare first step": ["-c", BARE + "step()"],
    "Ignite's first step": ["-c", BARE + IGNITE],
    "Lightning's first step": ["-c", "import sys\n" + BARE + LIGHTNING],
}
OVER = [
    ("import everstep", "an empty program", 0.02),
    ("import everstep, TrainLoop", "import numpy", None),
    ("everstep --help", "an empty program", None),
    ("everstep --help", "import click", None),
    ("everstep runs --help", "import click", None),
    ("everstep show --help", "import click", None),
    ("first step in a TrainLoop", "bare first step", 0.1),
]
"""What is compared with what, and how many seconds more are wanted at most."""


def measure(options: argparse.Namespace) -> Iterator[Table]:
    found = rounds(sys.executable, PROGRAMS, options.repeats)
    seconds, memory = [], []
    for name, base, goal in OVER:
        times, others = ([figure[0] * 1e3 for figure in found[each]] for each in (name, base))
        limit = None if goal is None else 1 + goal * 1e3 / statistics.median(others)
        seconds.append(Figure(f"{name}, over {base}", "ms", times, others, limit))
    loop, bare = (
        [each[1] for each in found[name]] for name in ("first step in a TrainLoop", "bare first step")
    )
    limit = 1 + 15 / statistics.median(bare)
    memory.append(Figure("largest memory of the first step in a TrainLoop", "MB", loop, bare, limit))
    if options.peers:
        found = rounds(options.peers, PEERS, options.repeats)
        bare = [figure[0] * 1e3 for figure in found.pop("bare first step")]
        for name, figures in found.items():
            seconds.append(
                Figure(f"{name}, over bare first step", "ms", [each[0] * 1e3 for each in figures], bare)
            )
    how = "CPU time of whole processes. Goals: 20 ms for the import, 100 ms and 15 MB for the first step."
    yield Table("A start", how, seconds + memory)


def rounds(python: str, programs: dict[str, list[str]], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """(CPU seconds, megabytes) of each program, which take turns."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(repeats + 1):
            for name, arguments in programs.items():
                run_dir = [f"{folder}/{repeat}"] if arguments[0] == "-c" else []
                figure = run([python, *arguments, *run_dir])
                if repeat:  # the first round warms the caches of the disk
                    found[name].append(figure)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--peers", metavar="PYTHON", help="an interpreter that has bench/requirements.txt")


def run(command: list[str]) -> tuple[float, float]:
    """CPU seconds and megabytes of memory at its peak."""
    silent = os.open(os.devnull, os.O_WRONLY)
    files = [(os.POSIX_SPAWN_DUP2, silent, number) for number in (1, 2)]
    child = os.posix_spawn(command[0], command, os.environ, file_actions=files)
    os.close(silent)
    _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit(f"this program failed: {' '.join(command)}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


if __name__ == "__main__":
    program(__doc__, measure, add_arguments)
