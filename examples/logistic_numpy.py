"""Logistic regression in plain NumPy, kept safe by a Supervisor.  Stop it anywhere and start it again."""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

import everstep

Array = NDArray[np.float64]


def probabilities(weights: Array, bias: Array, x: Array) -> Array:
    """Softmax of the scores: (batch, 64) to (batch, 10)."""
    scores = x @ weights + bias
    scores -= scores.max(axis=1, keepdims=True)
    likelihood = np.exp(scores)
    total: Array = likelihood.sum(axis=1, keepdims=True)
    return likelihood / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", default="runs/logistic", help="the run's directory")
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()

    digits = load_digits()
    x, y = digits.data / 16, digits.target
    train = everstep.data.arrays(x[:1437], y[:1437], batch_size=32, shuffle=True)

    weights, bias = np.zeros((64, 10)), np.zeros(10)
    velocity = np.zeros_like(weights)
    state = {"weights": weights, "bias": bias, "velocity": velocity}

    with everstep.Supervisor(
        options.run,
        state,
        seed=0,
        max_step=options.steps,
        services=[everstep.Checkpoints(everstep.Every(steps=500))],
    ) as sv:
        batches = sv.stream(train)
        while not sv.should_stop():
            bx, by = next(batches)
            bx = bx + 0.1 * np.random.standard_normal(bx.shape)  # noise comes back with the run, too
            error = probabilities(weights, bias, bx)
            loss = -np.log(error[np.arange(len(by)), by]).mean()
            error[np.arange(len(by)), by] -= 1
            velocity *= 0.9
            velocity += bx.T @ error / len(by)
            weights -= 0.05 * velocity
            bias -= 0.05 * error.mean(axis=0)
            sv.advance(loss=loss)
        accuracy = (probabilities(weights, bias, x[1437:]).argmax(axis=1) == y[1437:]).mean()
        sv.println(f"accuracy on digits it has not seen: {accuracy:.3f}")
    print(sv.ending.digest)


if __name__ == "__main__":
    main()
