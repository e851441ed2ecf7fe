"""A small training program with all sinks; it may kill itself: sinks_program.py RUN [step:N | tail:N]."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np

import everstep
from everstep import Every
from everstep.services import CSV, Histogram, Image, JSONLines, TensorBoard

EPOCHS, STEPS = 4, 20


def train(run_dir: Path, die: str = "") -> everstep.Ending:
    """4 epochs of 20 steps; summaries in head, steps and tail; a metric that appears late."""
    weights = np.zeros(3)
    data = everstep.data.arrays(np.arange(2.0 * STEPS), batch_size=2, shuffle=True)
    often = Every(steps=3)
    services = [JSONLines(every=often), CSV(every=often), TensorBoard(every=often)]

    def here(place: str) -> None:
        if place == die:
            os.kill(os.getpid(), signal.SIGKILL)

    with everstep.TrainLoop(
        run_dir,
        {"weights": weights},
        max_epoch=EPOCHS,
        seed=3,
        services=[*services, everstep.Checkpoints(Every(steps=7))],
    ) as loop:
        for epoch in loop.iter_epochs():
            loop.add_summary({"head": f"epoch {epoch}"})
            for step, (batch,) in loop.iter_steps(data):
                weights += 0.1 * (batch.mean() - weights) + np.random.standard_normal(3)
                if step % 2:
                    loop.collect_metrics(rate=1 / step)
                loop.collect_metrics(loss=weights @ weights)
                if step > 50:
                    loop.collect_metrics({"late, metric": step / 3})
                if step % 5 == 0:
                    pixels = np.random.rand(4, 6, 3)
                    loop.add_summary({"seen": {"noise": Image(pixels), "weights": Histogram(weights)}})
                here(f"step:{step}")
            with loop.evaluation():
                for _ in range(2):
                    loop.collect_metrics(valid_loss=weights.sum() / 7)
            loop.add_summary({"tail": f"weights are {weights}"})
            here(f"tail:{epoch}")
    return loop.ending


if __name__ == "__main__":
    train(Path(sys.argv[1]), *sys.argv[2:])
