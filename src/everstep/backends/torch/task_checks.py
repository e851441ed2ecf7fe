"""Checks of a task: its device can be used, its loss is one number with gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from everstep.backends.torch.older_torch import accelerators
from everstep.errors import ConfigError, MetricError


def require_device(device: torch.device) -> None:
    """Refuse a device on which no tensor can be made."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"device={str(device)!r} cannot be used here ({reason}); torch finds "
            f'{accelerators()} accelerators: give one of them, or "cpu"'
        ) from error


def loss_in(name: str, metrics: Any) -> Tensor:
    """Find the loss in what `forward` returned, and check that it has gradients."""
    loss = metrics.get("loss") if isinstance(metrics, Mapping) else None
    if not isinstance(loss, Tensor):
        raise MetricError(
            f"{name}.forward returned {metrics!r}; return a mapping with the loss, a tensor, "
            'as in {"loss": loss}'
        )
    if loss.numel() != 1:
        raise MetricError(
            f"the loss of {name}.forward has the shape {tuple(loss.shape)}: return its mean, loss.mean()"
        )
    if not loss.requires_grad:
        raise MetricError(
            f"the loss of {name}.forward depends on no parameter that is trained: compute it from "
            "self.model(...), without detach() or item(), and leave something to be trained"
        )
    return loss
