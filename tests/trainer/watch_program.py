"""`train RUN` trains slowly, with a checkpoint after each step; `watch RUN` evaluates them, a line each."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import everstep
from tiny_task import TinyTask, trainer
from waiting import PATIENCE


class Paced(TinyTask):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        threading.Event().wait(self.seconds)  # so that two processes have time to meet
        return super().train_step(batch)


def door(run_dir: Path, seconds: float = 0.0, steps: int = 40) -> everstep.Trainer:
    services = [
        everstep.Evaluate("valid", everstep.Never()),
        everstep.Checkpoints(everstep.Every(steps=1), keep_last=None),
    ]
    return trainer(run_dir, Paced(seconds), services=services, max_epoch=None, max_step=steps)


if __name__ == "__main__":
    what, run_dir = sys.argv[1], Path(sys.argv[2])
    if what == "train":
        door(run_dir, 0.03).run_training()
    else:
        for found in door(run_dir).watch(["valid", "test"], timeout=PATIENCE):
            print(found, flush=True)
