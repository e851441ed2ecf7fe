"""Torch: the optimizer's rate is set by a counter in a Python variable."""

import torch
from tiny import X, Y, loop

import everstep

torch.manual_seed(0)
model = torch.nn.Linear(3, 1, dtype=torch.float64)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
updates = 0
train = everstep.data.arrays(torch.from_numpy(X), torch.from_numpy(Y), batch_size=4, shuffle=True)
with loop({"model": model, "optimizer": optimizer}) as run:
    for _ in run.iter_epochs():
        for _step, (x, y) in run.iter_steps(train):
            loss = ((model(x)[:, 0] - y) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            updates += 1
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + updates)
            run.collect_metrics(loss=loss)
