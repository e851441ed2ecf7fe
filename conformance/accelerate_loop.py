"""A loop with Accelerate: python accelerate_loop.py [--stateful] FOLDER

After its page "Checkpointing": ProjectConfiguration(automatic_checkpoint_naming=True), save_state,
load_state, and skip_first_batches for what the epoch has done ("Restoring the state of the DataLoader").
With --stateful, DataLoaderConfiguration(use_stateful_dataloader=True), as the same page says.
use_seedable_sampler=True with set_epoch is from its page "Comparing performance across distributed setups".
"""

from __future__ import annotations

import os
import sys

import task
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

torch.set_num_threads(1)
set_seed(7)
witness = task.witness("accelerate", "torchdata")
folder, is_stateful = sys.argv[-1], "--stateful" in sys.argv
accelerator = Accelerator(
    cpu=True,
    project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2),
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=is_stateful),
)
model = task.network()
optimizer, schedule = task.optimizer_and_schedule(model)
loader = DataLoader(task.Samples(), task.BATCH, shuffle=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)


class Position:
    """The step, registered for checkpointing as the page shows."""

    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


position = Position()
accelerator.register_for_checkpointing(position)
saved = os.path.join(folder, "checkpoints")
if os.path.isdir(saved) and os.listdir(saved):
    accelerator.load_state()
    accelerator.project_configuration.iteration = position.step // task.SAVE_EVERY
first_epoch, done = divmod(position.step, task.EPOCH)
model.train()
for epoch in range(first_epoch, task.EPOCHS):
    loader.set_epoch(epoch)
    batches = loader
    if epoch == first_epoch and done and not is_stateful:
        batches = accelerator.skip_first_batches(loader, done)
    for x, y, numbers in batches:
        loss = cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        position.step += 1
        witness.step(position.step, numbers, loss.item())
        if position.step % task.SAVE_EVERY == 0:
            accelerator.save_state()
witness.end(weights=accelerator.unwrap_model(model).state_dict(), optimizer=task.moments(optimizer))
