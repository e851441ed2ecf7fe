"""Keras on torch: python keras_fit.py FOLDER

After its page "BackupAndRestore" (save_freq, double_checkpoint, delete_checkpoint=False), with a step from
its guide "Customizing what happens in fit() with PyTorch" that keeps the numbers of the samples, and
utils.set_random_seed.
"""

from __future__ import annotations

import os
import sys

os.environ["KERAS_BACKEND"] = "torch"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import keras
import task
import torch
from torch.utils.data import DataLoader

torch.set_num_threads(1)
keras.utils.set_random_seed(7)
witness = task.witness("keras")


class Network(keras.Sequential):
    def train_step(self, data):
        x, y, self.numbers = data
        self.zero_grad()
        self.loss_of_step = self.compute_loss(y=y, y_pred=self(x, training=True))
        self.loss_of_step.backward()
        weights = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        return {"loss": self.loss_of_step.detach()}


class Tell(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        numbers = [int(number) for number in self.model.numbers]
        witness.step(int(self.model.optimizer.iterations.value), numbers, self.model.loss_of_step.item())


layers = keras.layers
model = Network(
    [
        layers.Input((64,)), layers.Dense(128, activation="relu"), layers.Dropout(0.2),
        layers.Dense(128, activation="relu"), layers.Dropout(0.2), layers.Dense(10),
    ]
)  # fmt: skip
model.compile(
    keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(1e-3, task.STEPS)),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
backup = keras.callbacks.BackupAndRestore(
    sys.argv[-1], save_freq=task.SAVE_EVERY, double_checkpoint=True, delete_checkpoint=False
)
loader = DataLoader(task.Samples(), task.BATCH, shuffle=True)
model.fit(loader, epochs=task.EPOCHS, callbacks=[Tell(), backup], verbose=0)
witness.end(
    weights={f"{number} {each.path}": each.value for number, each in enumerate(model.weights)},
    optimizer={f"{number} {each.path}": each.value for number, each in enumerate(model.optimizer.variables)},
)
