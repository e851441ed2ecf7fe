"""Transformers' Trainer: python hf_trainer.py FOLDER

After its page "Trainer" (Checkpoints: save_strategy, save_steps, save_total_limit;
train(resume_from_checkpoint=...)), with `get_last_checkpoint` as its example scripts have it, and
enable_jit_checkpoint (its page on TrainingArguments), which saves at SIGTERM.
"""

from __future__ import annotations

import os
import sys

os.environ["CUDA_VISIBLE_DEVICES"] = ""
import task
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = task.network()

    def forward(self, x, labels):
        return {"loss": cross_entropy(self.model(x), labels)}


class Samples(task.Samples):
    def __getitem__(self, index):
        x, y, number = super().__getitem__(index)
        return {"x": x, "labels": y, "numbers": number}


class Told(Trainer):
    """Keeps numbers and loss of a step for the witness."""

    def training_step(self, model, inputs, *rest):
        self.numbers = inputs.pop("numbers")
        self.loss = super().training_step(model, inputs, *rest)
        return self.loss


class Tell(TrainerCallback):
    def on_step_end(self, args, state, control, **rest):
        witness.step(state.global_step, trainer.numbers, trainer.loss.item())


torch.set_num_threads(1)
set_seed(7)
witness = task.witness("transformers", "accelerate")
folder = sys.argv[-1]
model = Model()
arguments = TrainingArguments(
    folder, num_train_epochs=task.EPOCHS, per_device_train_batch_size=task.BATCH, seed=7, data_seed=7,
    save_strategy="steps", save_steps=task.SAVE_EVERY, save_total_limit=2, enable_jit_checkpoint=True,
    remove_unused_columns=False, max_grad_norm=0, report_to="none", logging_strategy="no", disable_tqdm=True,
    use_cpu=True, dataloader_pin_memory=False,
)  # fmt: skip
trainer = Told(
    model,
    arguments,
    train_dataset=Samples(),
    optimizers=task.optimizer_and_schedule(model),
    callbacks=[Tell()],
)
trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
witness.end(weights=model.state_dict(), optimizer=task.moments(trainer.optimizer.optimizer))
