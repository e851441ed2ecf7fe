"""everstep's TrainLoop: python everstep_loop.py FOLDER

After docs/quickstart.md, with a DataLoader of torch as it is (docs/guide/data.md).
"""

from __future__ import annotations

import sys

import task
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import everstep

task.seed()
witness = task.witness("everstep")
model = task.network()
optimizer, schedule = task.optimizer_and_schedule(model)
train = DataLoader(task.Samples(), task.BATCH, shuffle=True)

with everstep.TrainLoop(
    sys.argv[1],
    state={"model": model, "optimizer": optimizer, "schedule": schedule},
    max_epoch=task.EPOCHS,
    seed=7,
    services=[everstep.Checkpoints(everstep.Every(steps=task.SAVE_EVERY))],
) as loop:
    for _ in loop.iter_epochs():
        for step, (x, y, numbers) in loop.iter_steps(train):
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            witness.step(step, numbers, loss.item())
            loop.collect_metrics(loss=loss)
witness.end(weights=model.state_dict(), optimizer=task.moments(optimizer))
