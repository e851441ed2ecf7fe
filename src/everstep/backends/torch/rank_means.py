"""Averages over ranks that DistributedDataParallel does not make: of counts, and of a window cut short."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from everstep.backends.torch.window import window
from everstep.errors import ConfigError


class Ranks:
    """The ranks that train one model; all of them call each method at the same place.

    Args:
        device: where the gradients are.
        group: the process group that averages them; None for all processes.
        models: the models that `fully_shard` divides, which average their gradients in each backward pass.
    """

    def __init__(
        self, device: torch.device, group: dist.ProcessGroup | None = None, models: Sequence[Module] = ()
    ) -> None:
        self._group, self._device, self._models = group, device, models
        self.size = dist.get_world_size(self._group)

    @classmethod
    def of(cls, ddp: DistributedDataParallel) -> Ranks:
        """Return the ranks over which a wrapper averages."""
        return cls(ddp.device, ddp.process_group)

    def means(self, values: Sequence[float | Tensor]) -> list[float] | list[Tensor]:
        """Return the mean over ranks of each number, in float64: equal bits on all ranks.

        Numbers on a GPU are returned as tensors there: reading them would wait for it.
        """
        both = torch.stack([self._number(value) for value in values])
        dist.all_reduce(both, group=self._group)
        both /= self.size
        return both.tolist() if both.is_cpu else list(both)

    def _number(self, value: float | Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().reshape(()).to(self._device, torch.float64)
        return torch.full((), value, dtype=torch.float64, device=self._device)

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients that `no_sync` has kept from it; one that no rank has stays None.

        Raises:
            ConfigError: `set_requires_gradient_sync` has kept gradients from a sharded model's average.
        """
        if self._models:
            if window(self._models):
                raise ConfigError(
                    "a short window ends, and its gradients were not averaged: leave out "
                    "model.set_requires_gradient_sync(False), or flush no MinibatchOptimizer"
                )
            return
        having = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32).to(self._device)
        dist.all_reduce(having, dist.ReduceOp.MAX, group=self._group)
        for parameter, anywhere in zip(parameters, having.tolist(), strict=True):
            if anywhere:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(grad, group=self._group)
                parameter.grad = grad.div_(self.size)
