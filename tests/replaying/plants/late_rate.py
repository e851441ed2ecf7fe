"""Averaged weights, a rate that falls after step 20; in the other program one step later."""

import sys

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import everstep

torch.manual_seed(8)
x = torch.randn(80, 5)
y = x.abs().sum(1, keepdim=True)
model = torch.nn.Sequential(
    torch.nn.Linear(5, 12), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(12, 1)
)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)


def rate(step):
    last = 20
    # fault: last = 21
    return 0.02 if step <= last else 0.002


data = everstep.data.arrays(x, y, batch_size=8, shuffle=True)
state = {"model": model, "average": average, "optimizer": optimizer}
saves = everstep.Checkpoints(everstep.Every(steps=6))
with everstep.TrainLoop(sys.argv[1], state, max_epoch=4, seed=9, services=[saves]) as loop:
    for _epoch in loop.iter_epochs():
        for step, (bx, by) in loop.iter_steps(data):
            optimizer.param_groups[0]["lr"] = rate(step)
            loss = (model(bx) - by).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
            loop.collect_metrics(loss=loss)
