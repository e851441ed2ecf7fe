"""Handwritten digits: a small convolutional network, trained through a TrainLoop.

Stop it at any point, with Ctrl-C or kill -9, and start it again: it resumes, and ends with the same bits.
"""

from __future__ import annotations

import argparse
import os
import random

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import everstep

TRAINING = 1437  # of 1,797 images; the rest is for validation


class Digits(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """scikit-learn's 8x8 images of digits, each time a little different.

    The augmentation draws from Python's and torch's global generators, as augmentations do; a
    resumed run draws the very same numbers.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        shift = random.choice((-1, 0, 1)), random.choice((-1, 0, 1))
        image = torch.roll(self.images[index], shift, dims=(-2, -1))
        return image + 0.1 * torch.randn_like(image), self.labels[index]


def network() -> nn.Module:
    """(batch, 1, 8, 8) -> (batch, 10); about 240,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(),
        nn.Conv2d(48, 96, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(1536, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", default="runs/digits", help="the run's directory (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=40, help="in all (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=0, help="of the data loader; changes no bit")
    parser.add_argument(
        "--again", action="store_true", help="start over; the checkpoints move to superseded/"
    )
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)  # so small a model gains nothing from more
    torch.manual_seed(7)  # of the initial weights
    device = "cuda" if torch.cuda.is_available() else "cpu"

    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    train = everstep.data.loader(
        Digits(images[:TRAINING], labels[:TRAINING]), batch_size=32, shuffle=True, num_workers=options.workers
    )
    x_valid, y_valid = images[TRAINING:].to(device), labels[TRAINING:].to(device)

    model = network().to(device)  # before the optimizer is made
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs)

    with everstep.TrainLoop(
        options.run,
        state={"model": model, "optimizer": optimizer, "schedule": schedule},
        max_epoch=options.epochs,
        seed=7,
        watch="valid_accuracy",
        services=[everstep.Checkpoints(everstep.Every(steps=100))],
        resume=not options.again,
    ) as loop:
        loop.print_training_summary()
        loop.println(f"stop me with Ctrl-C, or with kill -9 {os.getpid()}, and start me again")
        for _epoch in loop.iter_epochs():
            for _step, (x, y) in loop.iter_steps(train):
                loss = cross_entropy(model(x.to(device)), y.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loop.collect_metrics(loss=loss)
            with loop.evaluation(), loop.timeit("valid_time"):
                scores = model(x_valid)
                loop.collect_metrics(
                    valid_loss=cross_entropy(scores, y_valid),
                    valid_accuracy=(scores.argmax(1) == y_valid).float().mean(),
                )
            schedule.step()
            loop.print_logs()
    print(report(loop.ending))


def report(ending: everstep.supervisor.Ending) -> str:
    """Where everything lies, the digest of the final state, and what to type next."""
    lines = [f"  {name:12} {os.path.relpath(path)}" for name, path in ending.where.items()]
    if ending.best is not None:
        lines.append(f"best {ending.best.metric}: {ending.best.value:.4f}, in epoch {ending.best.epoch}")
    promise = "The digest is the same however often the run was stopped."
    if not ending.one_fingerprint:
        promise = "Parts of the run were computed on another kind of machine, so no digest is promised."
    return "\n".join(
        [
            "",
            *lines,
            f"digest of the state: {ending.digest}",
            f"{promise}  What to type next:",
            "  make play                        again: this run is finished, no step is run",
            '  make play ARGS="--epochs 50"     a raised limit: the run continues from here',
            "  make play ARGS=--again           from the start; stop it where you like, then make play",
        ]
    )


if __name__ == "__main__":
    main()
