"""The task that every adapter of this folder trains, so that only the loop around it differs.

A 64-128-128-10 network with dropout, Adam, a cosine schedule per step; 800 samples, shuffled; augmentation
from the global generators of Python, NumPy and torch; 5 epochs of 50 steps, a checkpoint every 20 steps.
"""

from __future__ import annotations

import random
import sys
from importlib import metadata
from typing import Any

import numpy as np
import torch
from torch import nn
from witness import Witness

SAMPLES, BATCH, EPOCHS, SAVE_EVERY = 800, 16, 5, 20
EPOCH = SAMPLES // BATCH
STEPS = EPOCHS * EPOCH


class Samples(torch.utils.data.Dataset):
    """(64 inputs, class, number of the sample), each time a little different."""

    def __init__(self) -> None:
        made_up = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 64, generator=made_up)
        self.y = (self.x @ torch.randn(64, 10, generator=made_up)).argmax(1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        noise = torch.from_numpy(np.random.normal(0, 0.05, 64).astype("float32"))
        return self.x[index] * random.uniform(0.8, 1.2) + noise + 0.05 * torch.randn(64), self.y[index], index


def seed() -> None:
    """Seed all that the task draws from, as scripts do at their start."""
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    torch.set_num_threads(1)


def network() -> nn.Sequential:
    """Make the network."""
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(128, 10),
    )  # fmt: skip


def optimizer_and_schedule(model: nn.Module) -> tuple[Any, Any]:
    """Make Adam, and the cosine schedule that is stepped after each of its steps."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)


def moments(optimizer: Any) -> dict[str, Any]:
    """The tensors of an optimizer by name."""
    state = optimizer.state_dict()["state"]
    return {f"{number}/{name}": value for number, each in state.items() for name, value in each.items()}


def witness(*packages: str) -> Witness:
    """Make the witness; it tells the versions of torch and of these packages."""
    return Witness(
        python=sys.version.split()[0], **{name: metadata.version(name) for name in ("torch", *packages)}
    )
