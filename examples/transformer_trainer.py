"""The transformer of transformer.py once more, as a task for a Trainer: the same weights, to the last bit.

Stop it at any point, with Ctrl-C or kill -9, and start it again: it resumes, and ends with the same bits.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformer import SMALL, Size, Transformer, loss_on, rate, sample, split, standard_library

import everstep


class NextByte(everstep.torch.Task):
    """To tell the next byte of a text: pieces of it come as the places where they begin."""

    def __init__(self, size: Size, text: Tensor) -> None:
        super().__init__(accumulate=size.accumulate, clip=everstep.torch.Clip(global_norm=1.0), ema=0.99)
        self.size, self.text = size, text

    def build_model(self) -> nn.Module:
        return Transformer(self.size)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    scheduler_interval = "update"

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: rate(self.size, update + 1))

    def forward(self, batch: Any) -> Mapping[str, Any]:
        (starts,) = batch
        return {"loss": loss_on(self.model, self.text, starts, self.size.context)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", default="runs/transformer-trainer", help="the run's directory")
    parser.add_argument("--small", action="store_true", help="a size for tests")
    options = parser.parse_args()
    size = SMALL if options.small else Size()
    if options.small:
        torch.set_num_threads(1)  # so small a model gains nothing from more

    text = standard_library(size.files)
    train, held_out = split(text, size)
    task = NextByte(size, text)
    trainer = everstep.Trainer(
        task,
        {"train": train, "valid": everstep.data.arrays(held_out, batch_size=len(held_out))},
        options.run,
        max_epoch=size.epochs,
        steps_per_epoch=size.steps,
        seed=0,
        services=[
            everstep.Evaluate("valid"),
            everstep.Best("valid/loss"),
            everstep.Checkpoints(everstep.Every(steps=25)),
        ],
    )
    ending = trainer.run_training()
    with task.evaluating():
        task.model.eval()
        print(sample(task.model, "def ", 50 if options.small else 500, size.context))
    print(f"digest of the state: {ending.digest}")


if __name__ == "__main__":
    main()
