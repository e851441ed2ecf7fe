"""A program of one mirrored run.

It trains epochs of 4 steps, saves at each second step and each epoch's end, and keeps the two newest
checkpoints and the best weights.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import everstep

sys.path.insert(0, str(Path(__file__).parent.parent))
from tiny_runs import LoopHook, Tiny
from waiting import PATIENCE

EPOCHS = 3


def make(run_dir: Path, mirror: str | Path | None, epochs: int = EPOCHS, **arguments: Any) -> Tiny:
    """The run; its losses are best at some epoch's end."""
    when, wait = everstep.Every(steps=2) | everstep.Every(epochs=1), arguments.pop("mirror_wait", PATIENCE)
    saves = everstep.Checkpoints(when, keep_last=2, mirror=mirror, mirror_wait=wait)
    services = [saves, everstep.Best("valid_loss"), *arguments.pop("services", ())]
    return Tiny(run_dir, max_epoch=epochs, services=services, **arguments)


def train(tiny: Tiny, inside: LoopHook = lambda loop, step: None) -> Tiny:
    """Train to the end, with a value for `Best` after each epoch."""
    return tiny.train(inside, lambda loop, epoch: loop.collect_metrics(valid_loss=float(abs(tiny.w).sum())))
