"""Handwritten digits once more: the network of digits.py, as a task for a Trainer.

Stop it at any point, with Ctrl-C or kill -9, and start it again: it resumes, and ends with the same bits.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from digits import TRAINING, Digits, network
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import everstep


class Recognise(everstep.torch.Task):
    """What is trained, and how good it is."""

    def build_model(self) -> nn.Module:
        return network()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def forward(self, batch: Any) -> Mapping[str, Any]:
        images, labels = batch
        scores = self.model(images)
        accuracy = (scores.argmax(1) == labels).float().mean()
        return {"loss": cross_entropy(scores, labels), "accuracy": accuracy}

    def inference_step(self, batch: Any) -> Any:
        images, _ = batch
        return self.model(images).argmax(1)


def streams() -> dict[str, Any]:
    """Name to batches of (images, labels)."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    train = Digits(images[:TRAINING], labels[:TRAINING])
    valid = images[TRAINING:], labels[TRAINING:]
    return {
        "train": everstep.data.loader(train, batch_size=32, shuffle=True),
        "valid": everstep.data.arrays(*valid, batch_size=100),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", default="runs/digits-trainer", help="the run's directory")
    parser.add_argument("--epochs", type=int, default=40, help="in all (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)  # so small a model gains nothing from more

    trainer = everstep.Trainer(
        Recognise(ema=0.99, clip=everstep.torch.Clip(global_norm=5.0)),
        streams(),
        options.run,
        max_epoch=options.epochs,
        seed=7,
        services=[
            everstep.Evaluate("valid", validate_first=True),
            everstep.Best("valid/accuracy", "max"),
            everstep.EarlyStop("valid/accuracy", "max", patience=10),
            everstep.Checkpoints(everstep.Every(steps=100)),
        ],
    )
    trainer.run_training()


if __name__ == "__main__":
    main()
