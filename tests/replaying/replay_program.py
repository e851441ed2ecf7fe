"""A program to be replayed: dropout, an optimizer with moments, a schedule, an evaluation in the tail."""

from __future__ import annotations

import argparse
import sys

import torch

import everstep

asked = argparse.ArgumentParser()
asked.add_argument("run_dir")
asked.add_argument("--door", default="TrainLoop")
asked.add_argument("--stop", type=int, default=None)
asked.add_argument("--epochs", type=int, default=4)
asked.add_argument("--decay", type=float, default=0.01)
asked.add_argument("--seed", type=int, default=3)
asked.add_argument("--workers", type=int, default=0)
asked.add_argument("--fault", default="")
asked.add_argument("--at", type=int, default=0)
asked.add_argument("--keep", type=int, default=None)
given = asked.parse_args()

torch.manual_seed(0)
x = torch.randn(48, 6)
y = x @ torch.randn(6, 1) + 0.1 * torch.randn(48, 1)
model = torch.nn.Sequential(
    torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=given.decay)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return len(x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return x[index] + 0.01 * torch.randn(6), y[index]


if given.workers:
    train = everstep.data.loader(Rows(), batch_size=8, shuffle=True, num_workers=given.workers)
else:
    train = everstep.data.arrays(x, y, batch_size=8, shuffle=True)
saves = everstep.Checkpoints(everstep.Every(steps=5) | everstep.Every(epochs=1), keep_last=given.keep)
told = everstep.services.Notify(
    command=[sys.executable, "-c", f"open({given.run_dir + '.told'!r}, 'a').write('x')"]
)
arguments = {"seed": given.seed if given.seed >= 0 else None, "services": [saves, told]}


def faulty(name: str, step: int) -> bool:
    return given.fault == name and step == given.at


def update(step: int, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    bx, by = batch
    if faulty("draw", step):
        torch.rand(1)
    loss = (model(bx) - by).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if given.fault == "clipped" and step >= given.at:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    if faulty("weight", step):
        with torch.no_grad():
            model[3].weight[0, 0] += 1e-3
    return loss.detach()


def train_loop() -> None:
    data = train
    with everstep.TrainLoop(
        given.run_dir, state, max_epoch=given.epochs, max_step=given.stop, **arguments
    ) as loop:
        for epoch in loop.iter_epochs():
            if given.fault == "order" and epoch >= 2:
                data = everstep.data.arrays(x.flip(0), y.flip(0), batch_size=8, shuffle=True)
            for step, batch in loop.iter_steps(data):
                if faulty("moment", step) and loop.resumed:
                    optimizer.state.clear()
                loop.collect_metrics(loss=update(step, batch))
            scheduler.step()
            model.eval()
            with torch.no_grad():
                loop.collect_metrics(valid_loss=(model(x) - y).square().mean())
            model.train()


def supervisor() -> None:
    with everstep.Supervisor(given.run_dir, state, max_step=given.stop or 24, **arguments) as sv:
        batches = sv.stream(train)
        while not sv.should_stop():
            sv.advance(loss=update(sv.step + 1, next(batches)))


{"TrainLoop": train_loop, "Supervisor": supervisor}[given.door]()
print("behind the loop")
with open(given.run_dir + ".behind", "a") as file:
    file.write("x")
