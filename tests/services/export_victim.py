"""Run a program that exports and keeps its best, once per hazard point and count, and be killed there.

`python export_victim.py FOLDER` leaves FOLDER/NUMBER: run 0 undisturbed, the others killed, copied to
FOLDER/NUMBER.killed as the kill left them, and started again.  Prints "NUMBER SPEC" for each kill.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

import everstep
from everstep import Every, hazard
from everstep.services import Export, OnBest
from tiny_runs import Tiny

STRIDE = 23
LOSSES = {1: 0.5, 2: 0.3, 3: 0.4}


def train(run_dir: Path) -> None:
    services = [
        Export(Every(steps=3), entry="w", keep=2, name="latest"),
        Export(OnBest("valid_loss"), entry="w", keep=1, name="best"),
        Export(entry="w", name="final"),
        everstep.Best("valid_loss", keep=2),
        everstep.Checkpoints(Every(steps=2) | Every(epochs=1)),
    ]
    Tiny(run_dir, max_epoch=3, services=services, default_services=False).train(tail=evaluate)


def evaluate(loop: Any, epoch: int) -> None:
    loop.collect_metrics(valid_loss=LOSSES[epoch])


def start(run_dir: Path, spec: str | None = None) -> int:
    """Train in a process of its own; its wait status."""
    pid = os.fork()
    if pid == 0:
        np.random.seed(0)
        hazard.arm(spec)
        train(run_dir)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def main(root: Path) -> None:
    assert start(root / "0") == 0
    assert start(root / "traced", f"trace:{root / 'trace'}") == 0
    shutil.rmtree(root / "traced")
    points = Counter((root / "trace").read_text().split())
    specs = [f"kill:{p}:{n}" for p, count in sorted(points.items()) for n in range(1, count + 1)]
    for number, spec in enumerate(specs[::STRIDE], 1):
        run_dir = root / str(number)
        if start(run_dir, spec) == signal.SIGKILL:
            shutil.copytree(run_dir, root / f"{number}.killed")
            print(number, spec)
        assert start(run_dir) == 0, spec


if __name__ == "__main__":
    main(Path(sys.argv[1]))
