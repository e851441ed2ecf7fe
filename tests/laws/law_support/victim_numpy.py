"""Logistic regression on NumPy alone, through a Supervisor: `python victim_numpy.py RUN_DIR ...`."""

from __future__ import annotations

import argparse
import os
import sys

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import everstep
from law_support.campaign_pace import take
from law_support.diary import Diary

SAMPLES, FEATURES = 96, 5


def options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir")
    parser.add_argument("--diary", default=None)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--sleep", type=float, default=0.0)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    args = options(arguments)
    diary = Diary(args.diary)
    diary("start-up")
    rng = np.random.default_rng(5)
    x = rng.normal(size=(SAMPLES, FEATURES))
    y = (x @ np.arange(FEATURES) > 0).astype(float)
    weights, velocity = np.zeros(FEATURES), np.zeros(FEATURES)
    noise = np.random.default_rng(6)
    notes = {"seen": 0}
    state = {"weights": weights, "velocity": velocity, "noise": noise, "notes": notes}
    data = everstep.data.arrays(x, y, batch_size=8, shuffle=True)
    checkpoints = everstep.Checkpoints(everstep.Every(steps=args.every))
    with everstep.Supervisor(args.run_dir, state, services=[checkpoints], seed=3, max_step=args.steps) as sv:
        batches = sv.stream(data)
        while not sv.should_stop():
            bx, by = next(batches)
            diary("body", sv.step + 1)
            bx = bx + noise.normal(0, 0.1, bx.shape) + np.random.normal(0, 0.1)
            p = 1 / (1 + np.exp(-(bx @ weights)))
            velocity[:] = 0.9 * velocity + (p - by) @ bx / len(by)
            weights -= 0.1 * velocity
            notes["seen"] += len(by)
            take(args.sleep)
            sv.advance(loss=float(np.mean((p - by) ** 2)), batch=bx.sum())
        diary("shutdown", sv.step)
    diary("over")


if __name__ == "__main__":
    main(sys.argv[1:])
