"""skorch's NeuralNet: python skorch_net.py FOLDER

After its pages "Saving and Loading" and "Callbacks": Checkpoint(monitor=None), which saves each epoch (it
knows no steps), load_params(checkpoint=...), partial_fit for the epochs that are left, LRScheduler with
step_every="batch".
"""

from __future__ import annotations

import sys
from pathlib import Path

import task
import torch
from skorch import NeuralNet
from skorch.callbacks import Callback, Checkpoint, LRScheduler
from torch import nn

task.seed()
witness = task.witness("skorch")
folder = Path(sys.argv[-1])


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = task.network()

    def forward(self, x, numbers):
        return self.model(x)


class Samples(task.Samples):
    def __getitem__(self, index):
        x, y, number = super().__getitem__(index)
        return {"x": x, "numbers": number}, y


class Tell(Callback):
    def on_batch_end(self, net, batch, training, loss, **rest):
        step = (len(net.history) - 1) * task.EPOCH + len(net.history[-1]["batches"])
        witness.step(step, batch[0]["numbers"], loss.item())


saves = Checkpoint(monitor=None, dirname=str(folder))
net = NeuralNet(
    Module, nn.CrossEntropyLoss, optimizer=torch.optim.Adam, lr=1e-3, batch_size=task.BATCH, train_split=None,
    iterator_train__shuffle=True, verbose=0, device="cpu",
    callbacks=[
        Tell(), saves,
        LRScheduler(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=task.STEPS, step_every="batch"),
    ],
)  # fmt: skip
net.initialize()
if (folder / "params.pt").exists():
    net.load_params(checkpoint=saves)
net.partial_fit(Samples(), epochs=task.EPOCHS - len(net.history))
witness.end(weights=net.module_.state_dict(), optimizer=task.moments(net.optimizer_))
