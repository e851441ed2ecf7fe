"""An experiment on NumPy whose every bit depends on samples, order, noise, momentum and configuration."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import everstep

CONFIG = """
task: {call: tiny_experiment:TinyTask, scale: 1.0}
optimizer: {call: tiny_experiment:Momentum, lr: 0.1}
streams:
  train: {call: tiny_experiment:numbers, count: 8, shuffle: true}
  valid: {call: tiny_experiment:numbers, count: 5}
trainer: {max_epoch: 3}
services:
- Evaluate: {stream: valid}
- Checkpoints: {every: [{steps: 3}, {epochs: 1}]}
seed: 7
"""


class Momentum:
    """An optimizer by hand."""

    def __init__(self, w: Any, lr: float = 0.1, decay: float = 0.9) -> None:
        self.w, self.lr, self.decay = w, lr, decay
        self.momentum = np.zeros_like(w)

    def step(self, gradient: Any) -> None:
        self.momentum[:] = self.decay * self.momentum + gradient
        self.w -= self.lr * self.momentum


class TinyTask(everstep.Task):
    """Follows the mean of the samples."""

    def __init__(self, scale: float = 1.0, width: int = 3) -> None:
        self.scale, self.width = scale, width
        self.steps = 0

    def build_model(self) -> Any:
        return np.random.standard_normal(self.width)

    def build_optimizer(self, model: Any) -> Any:
        return Momentum(model)

    def state(self) -> Mapping[str, Any]:
        return {"w": self.model, "momentum": self.optimizer.momentum}

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        (ids,) = batch
        gradient = self.scale * (self.model - ids.mean()) + np.random.standard_normal(self.width)
        self.optimizer.step(gradient)
        self.steps += 1
        if self.steps == int(os.environ.get("SIGINT_AT", "0")):
            os.kill(os.getpid(), signal.SIGINT)
        if self.steps == int(os.environ.get("SIGKILL_AT", "0")):
            os.kill(os.getpid(), signal.SIGKILL)
        return {"loss": float(gradient @ gradient)}

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        return {"loss": float(np.mean((batch[0] - self.model[0]) ** 2))}

    def inference_step(self, batch: Any) -> Any:
        return batch[0] * self.model[0]


class Ends(everstep.Service):
    """A hook of one's own: it ends the training at a step, in the way that it is told."""

    stage = everstep.services.Stage.DECIDE
    controller = True

    def __init__(self, at: int, how: str) -> None:
        super().__init__("ends", everstep.At(at))
        self.how = how

    def run(self, boundary: everstep.Boundary) -> everstep.Outcome | None:
        if self.how == "stop":
            return everstep.Outcome(actions=(everstep.Stop("it is enough"),))
        if self.how == "interrupt":
            return everstep.Outcome(actions=(everstep.services.Interrupt("the machine is taken away"),))
        os.kill(os.getpid(), signal.Signals[self.how])
        return None


def numbers(count: int = 8, batch_size: int = 2, shuffle: bool = False) -> Any:
    return everstep.data.arrays(np.arange(count), batch_size=batch_size, shuffle=shuffle)


def noise(count: int = 4) -> Any:
    """Data that is drawn when it is made."""
    return everstep.data.arrays(np.random.standard_normal(count), batch_size=2)


def write(folder: Path, extra: str = "") -> Path:
    """The config file and this module, in a folder."""
    (folder / "tiny_experiment.py").write_text(Path(__file__).read_text())
    file = folder / "tiny.yaml"
    file.write_text(CONFIG + extra)
    return file
