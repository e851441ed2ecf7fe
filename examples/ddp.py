"""Handwritten digits on several processes, or on one: the same program, the same losses.

    python examples/ddp.py
    torchrun --nproc-per-node 2 examples/ddp.py

Kill a process, or all of them, and start again: the run resumes, and ends with the same bits.
"""

from __future__ import annotations

import argparse
import random

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import everstep

TRAINING = 1437  # of 1,797 images; the rest is for validation


class Digits(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """scikit-learn's 8x8 images of digits, each moved a little.

    The draws belong to the sample, not to the process that it is handed to.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        shift = random.choice((-1, 0, 1)), random.choice((-1, 0, 1))
        return torch.roll(self.images[index], shift, dims=(-2, -1)), self.labels[index]


def network() -> nn.Module:
    """(batch, 8, 8) -> (batch, 10); float64, to show how little the numbers of processes differ.

    Dropout draws for each process's part of a batch, and BatchNorm measures that part: both train well on
    several processes, and neither has the losses of one.
    """
    layers = (nn.Flatten(), nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 10))
    return nn.Sequential(*layers).double()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    # torchrun takes --run for an option of its own that is cut short
    parser.add_argument("--run-dir", default="runs/ddp", help="the run's directory (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=20, help="in all (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)  # so small a model gains nothing from more
    torch.manual_seed(7)  # of the initial weights

    digits = load_digits()
    images, labels = torch.tensor(digits.images / 16), torch.tensor(digits.target)
    train = everstep.data.loader(
        Digits(images[:TRAINING], labels[:TRAINING]),
        batch_size=32,  # of all processes together
        shuffle=True,
    )

    model = everstep.torch.parallel(network())  # on one process: the network itself
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with everstep.TrainLoop(
        options.run_dir,
        state={"model": model, "optimizer": optimizer},
        max_epoch=options.epochs,
        seed=7,
        watch="valid_accuracy",
        uneven="weight",  # the last batch has 29 images
        services=[everstep.Checkpoints(everstep.Every(steps=100))],
    ) as loop:
        # Each process evaluates its part of the rest; `weight` makes the mean one over all images.
        x_valid, y_valid = (
            images[TRAINING + loop.rank :: loop.ranks],
            labels[TRAINING + loop.rank :: loop.ranks],
        )
        for _epoch in loop.iter_epochs():
            for _step, (x, y) in loop.iter_steps(train):
                loss = cross_entropy(model(x), y)
                optimizer.zero_grad()
                (loss * loop.batch_weight).backward()  # 1.0, but in an uneven batch
                optimizer.step()
                loop.collect_metrics(loss=loss)
            with loop.evaluation(), loop.metric_collector("valid_accuracy") as accuracy:
                right = model(x_valid).argmax(1) == y_valid
                accuracy.collect(right.double().mean(), weight=len(right))
            loop.print_logs()
    if loop.rank == 0:
        print("digest of the state:", loop.ending.digest)


if __name__ == "__main__":
    main()
