"""What the drilled scripts share: a linear model on NumPy with momentum, saved every third step."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import everstep

RNG = np.random.default_rng(5)
X = RNG.normal(size=(24, 3))
Y = X @ np.array([1.0, -2.0, 0.5])


class Model:
    """`update` is one step of gradient descent with momentum; returns the loss."""

    def __init__(self) -> None:
        self.w, self.velocity = np.zeros(3), np.zeros(3)

    def state(self) -> dict[str, Any]:
        return {"w": self.w, "velocity": self.velocity}

    def update(self, x: Any, y: Any, rate: float = 0.05, weight: float = 1.0) -> float:
        error = x @ self.w - y
        self.velocity *= 0.9
        self.velocity += error @ x / len(x)
        self.w -= rate * self.velocity
        return weight * float(error @ error)


def data() -> Any:
    return everstep.data.arrays(X, Y, batch_size=4, shuffle=True)


def loop(state: dict[str, Any], name: str = "runs/tiny", **arguments: Any) -> everstep.TrainLoop:
    """Four epochs of six steps."""
    services = [everstep.Checkpoints(everstep.Every(steps=4)), *arguments.pop("services", ())]
    run_dir = sys.argv[1] if len(sys.argv) > 1 else name
    settings = {"max_epoch": 4, "seed": 3, **arguments}
    return everstep.TrainLoop(run_dir, state, services=services, **settings)
