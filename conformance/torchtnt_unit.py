"""torchtnt's train() with a TrainUnit: python torchtnt_unit.py FOLDER

After its pages "Checkpointing" and "DistributedCheckpointSaver": save_every_n_train_steps,
keep_last_n_checkpoints, restore_from_latest with the train dataloader, which is torchdata's
StatefulDataLoader, since torchtnt saves the state of a loader that has one.
"""

from __future__ import annotations

import sys

import task
from torch.nn.functional import cross_entropy
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtnt.framework.callbacks import DistributedCheckpointSaver
from torchtnt.framework.train import train
from torchtnt.framework.unit import TrainUnit
from torchtnt.utils import seed

task.seed()
seed(7)
witness = task.witness("torchtnt", "torchdata")
folder = sys.argv[-1]


class Unit(TrainUnit):
    def __init__(self):
        super().__init__()
        self.module = task.network()
        self.optimizer, self.lr_scheduler = task.optimizer_and_schedule(self.module)

    def train_step(self, state, data):
        x, y, numbers = data
        loss = cross_entropy(self.module(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.lr_scheduler.step()
        witness.step(self.train_progress.num_steps_completed + 1, numbers, loss.item())


unit = Unit()
loader = StatefulDataLoader(task.Samples(), task.BATCH, shuffle=True)
saves = DistributedCheckpointSaver(
    folder, save_every_n_train_steps=task.SAVE_EVERY, keep_last_n_checkpoints=2
)
DistributedCheckpointSaver.restore_from_latest(folder, unit, train_dataloader=loader)
train(unit, loader, max_epochs=task.EPOCHS, callbacks=[saves])
witness.end(weights=unit.module.state_dict(), optimizer=task.moments(unit.optimizer))
