"""Gradients accumulated over three batches, averaged weights; one batch's loss is scaled otherwise."""

import sys

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import everstep

torch.manual_seed(2)
x = torch.randn(96, 4)
y = x.sin().sum(1, keepdim=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
data = everstep.data.arrays(x, y, batch_size=8, shuffle=True)
state = {"model": model, "average": average, "optimizer": optimizer}
saves = everstep.Checkpoints(everstep.Every(steps=9))
with everstep.TrainLoop(sys.argv[1], state, max_epoch=3, seed=2, services=[saves]) as loop:
    for _epoch in loop.iter_epochs():
        for step, (bx, by) in loop.iter_steps(data):
            loss = (model(bx) - by).square().mean()
            scale = 1 / 3
            # fault: if step == 13: scale = 1 / 2
            (loss * scale).backward()
            if step % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(model)
            loop.collect_metrics(loss=loss)
