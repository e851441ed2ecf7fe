"""Ignite's DeterministicEngine: python ignite_engine.py FOLDER

After its pages "ignite.engine" ("Resuming the training", "Deterministic training") and "Checkpoint":
Checkpoint with DiskSaver, Checkpoint.load_objects, manual_seed before run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import task
import torch
from ignite.engine import Events
from ignite.engine.deterministic import DeterministicEngine
from ignite.handlers import Checkpoint, DiskSaver
from ignite.utils import manual_seed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

task.seed()
manual_seed(7)
witness = task.witness("pytorch-ignite")
folder = Path(sys.argv[-1])
model = task.network()
optimizer, schedule = task.optimizer_and_schedule(model)
loader = DataLoader(task.Samples(), task.BATCH, shuffle=True)


def step(engine, batch):
    model.train()
    x, y, numbers = batch
    loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    return numbers, loss.item()


trainer = DeterministicEngine(step)


@trainer.on(Events.ITERATION_COMPLETED)
def tell(engine):
    witness.step(engine.state.iteration, *engine.state.output)


objects = {"trainer": trainer, "model": model, "optimizer": optimizer, "schedule": schedule}
saves = Checkpoint(objects, DiskSaver(str(folder), require_empty=False), n_saved=2)
trainer.add_event_handler(Events.ITERATION_COMPLETED(every=task.SAVE_EVERY), saves)
found = sorted(folder.glob("checkpoint_*.pt"), key=lambda path: int(path.stem.split("_")[-1]))
if found:
    Checkpoint.load_objects(to_load=objects, checkpoint=torch.load(found[-1], weights_only=False))
manual_seed(7)
trainer.run(loader, max_epochs=task.EPOCHS)
witness.end(weights=model.state_dict(), optimizer=task.moments(optimizer))
