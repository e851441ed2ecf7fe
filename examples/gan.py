"""A generative adversarial network on points: two models, two optimizers, one step of one's own.

Stop it at any point, with Ctrl-C or kill -9, and start it again: it resumes, and ends with the same bits.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as judged_as

import everstep

NOISE = 4


def perceptron(inputs: int, outputs: int) -> nn.Module:
    """(batch, inputs) -> (batch, outputs)."""
    return nn.Sequential(nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs))


def ring(count: int) -> Tensor:
    """(count, 2): points near the unit circle."""
    angle = 2 * torch.pi * torch.rand(count)
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(count, 2)


class GAN(everstep.Task):
    """The generator makes points, the critic tells them from real ones."""

    def __init__(self) -> None:
        self.generator, self.critic = perceptron(NOISE, 2), perceptron(2, 1)
        self.generating = torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
        self.criticism = torch.optim.Adam(self.critic.parameters(), lr=2e-3, betas=(0.5, 0.9))

    def state(self) -> Mapping[str, Any]:
        return {name: getattr(self, name) for name in ("generator", "critic", "generating", "criticism")}

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        (real,) = batch
        made = self.generator(torch.randn(len(real), NOISE))
        yes, no = torch.ones(len(real), 1), torch.zeros(len(real), 1)

        critic_loss = judged_as(self.critic(real), yes) + judged_as(self.critic(made.detach()), no)
        self.criticism.zero_grad()
        critic_loss.backward()
        self.criticism.step()

        generator_loss = judged_as(self.critic(made), yes)
        self.generating.zero_grad()
        generator_loss.backward()
        self.generating.step()
        return {"critic_loss": critic_loss, "generator_loss": generator_loss}

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        """How far, in the mean, made points lie from the circle."""
        with torch.no_grad():
            made = self.generator(torch.randn(len(batch[0]), NOISE))
        return {"distance": (made.norm(dim=1) - 1).abs().mean()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", default="runs/gan", help="the run's directory (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=30, help="in all (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)  # so small a model gains nothing from more
    torch.manual_seed(5)  # of the points and the initial weights

    points = everstep.data.arrays(ring(2000), batch_size=50, shuffle=True)
    everstep.Trainer(
        GAN(),
        {"train": points, "valid": everstep.data.arrays(ring(500), batch_size=100)},
        options.run,
        max_epoch=options.epochs,
        seed=5,
        services=[everstep.Best("valid/distance", "min")],
    ).run_training()


if __name__ == "__main__":
    main()
