"""Handwritten digits: a classifier trained through a TrainLoop.  Stop it anywhere and start it again."""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import everstep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", default="runs/digits", help="the run's directory")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    train = everstep.data.arrays(x[:1437], y[:1437], batch_size=32, shuffle=True)
    x_valid, y_valid = x[1437:], y[1437:]

    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(128, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}

    with everstep.TrainLoop(options.run, state, max_epoch=options.epochs) as loop:
        loop.print_training_summary()
        for _epoch in loop.iter_epochs():
            for _step, (bx, by) in loop.iter_steps(train):
                loss = cross_entropy(model(bx), by)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loop.collect_metrics(loss=loss)
            with loop.evaluation(), loop.timeit("valid_time"), torch.no_grad():
                scores = model(x_valid)
                loop.collect_metrics(
                    valid_loss=cross_entropy(scores, y_valid),
                    valid_accuracy=(scores.argmax(1) == y_valid).float().mean(),
                )
            schedule.step()
            loop.print_logs()
    print(loop.ending.digest)


if __name__ == "__main__":
    main()
