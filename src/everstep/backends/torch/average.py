"""Exponential average of a model's weights, for a task's `ema`."""

from __future__ import annotations

import torch
from torch.optim.swa_utils import AveragedModel


class Average(AveragedModel):
    """Exponential average of a model's weights; torch's own would wait for the device."""

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        super().__init__(model)
        self.decay = decay

    @torch.no_grad()
    def update_parameters(self, model: torch.nn.Module) -> None:
        """Add the weights to the average; the first update copies them, and buffers are always copied."""
        copied = list(zip(self.module.buffers(), model.buffers(), strict=True))
        averaged = list(zip(self.module.parameters(), model.parameters(), strict=True))
        if self.n_averaged:  # a tensor on the CPU, so that reading it waits for no device
            ours, theirs = map(list, zip(*averaged, strict=True))
            torch._foreach_lerp_(ours, theirs, 1 - self.decay)
        else:
            copied += averaged
        for our, their in copied:
            our.copy_(their)
        self.n_averaged += 1
