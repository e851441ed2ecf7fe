"""On several ranks: dropout from torch's generator and a counter of each rank's own, both in the checkpoint.

With "mask", the dropout is drawn from a generator that is not in the state; with "tally", rank 1 alone counts
in a variable.
"""

from __future__ import annotations

import sys

import torch

import everstep

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
numbers = torch.Generator().manual_seed(1)
x = torch.randn(35, 4, generator=numbers, dtype=torch.float64)
y = x.sum(1, keepdim=True)
torch.manual_seed(0)
layers = [torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)]
model = everstep.torch.parallel(torch.nn.Sequential(*layers).double())
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
seen = {"samples": 0, "tally": 0}
tally = 0
state = {"model": model, "optimizer": optimizer, "seen": everstep.PerRank(seen)}
each = [everstep.Checkpoints(everstep.Every(steps=3))]
with everstep.TrainLoop("run", state, seed=1, max_epoch=3, uneven="weight", services=each) as loop:
    for _ in loop.iter_epochs():
        data = everstep.data.arrays(x.numpy(), y.numpy(), batch_size=8, shuffle=True)
        for _, batch in loop.iter_steps(data):
            bx, by = map(torch.as_tensor, batch)
            if FAULT == "mask":
                bx = bx * (torch.rand(bx.shape, generator=numbers) < 0.9)
            loss = torch.nn.functional.mse_loss(model(bx), by)
            optimizer.zero_grad()
            (loss * loop.batch_weight).backward()
            optimizer.step()
            seen["samples"] += len(bx)
            if FAULT == "tally" and loop.rank == 1:
                tally += 1
                seen["tally"] = tally
            loop.collect_metrics(loss=loss)
