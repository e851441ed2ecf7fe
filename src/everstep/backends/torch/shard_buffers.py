"""Buffers of a model whose batch runs shard by shard: each shard begins with the same values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module

_MIX = (-7046029254386353131, -4417276706812531889, 1609587929392839161)
"""Odd constants of xxHash, as 64-bit integers with a sign; torch multiplies without a check for overflow."""


@dataclass(frozen=True)
class _Place:
    """Where a model holds a buffer, and what was there before the first shard."""

    holder: dict[str, Tensor | None]
    key: str
    name: str
    tensor: Tensor | None
    value: Tensor | None

    def reset(self) -> int:
        """Put the tensor back with its values; returns torch's count of changes after that."""
        if self.holder.get(self.key) is not self.tensor:
            self.holder[self.key] = self.tensor
        if self.tensor is None or self.value is None:
            return 0
        self.tensor.copy_(self.value)
        return self.tensor._version

    def put(self, mean: Tensor) -> None:
        """Let the buffer have these values: in place, unless the program has put another tensor there."""
        now = self.holder[self.key]
        if now is self.tensor and now is not None:
            now.copy_(mean)
        else:
            self.holder[self.key] = mean.clone()


class ShardBuffers:
    """The buffers of a model by their places, since a program may put another tensor into a place.

    Call `reset` before each shard.
    """

    def __init__(self, model: Module) -> None:
        self._places = [
            _Place(part._buffers, key, f"{path}.{key}".lstrip("."), tensor, _copied(tensor))
            for path, part in model.named_modules()
            for key, tensor in part._buffers.items()
        ]
        self._versions: list[int] = []

    def reset(self) -> None:
        """Give the model the buffers with which the first shard began."""
        self._versions = [place.reset() for place in self._places]

    def averaged(self) -> list[Tensor]:
        """List the buffers of which the mean over the shards is made: those of inexact numbers."""
        return [tensor for _, tensor in self._held() if _is_inexact(tensor)]

    def put(self, means: Sequence[Tensor]) -> None:
        """Give these values to the buffers that `averaged` lists."""
        places = [place for place, tensor in self._held() if _is_inexact(tensor)]
        for place, mean in zip(places, means, strict=True):
            place.put(mean)

    def counters(self) -> list[str]:
        """Names of the other buffers (counters, masks), which each shard has to change alike."""
        return [place.name for place, tensor in self._held() if not _is_inexact(tensor)]

    def changes(self) -> list[Tensor | int]:
        """Return for each of `counters` a number below 2**20 for its change by the shard, 0 for none."""
        versions = {id(place): version for place, version in zip(self._places, self._versions, strict=True)}
        return [
            _change(place, tensor, versions[id(place)])
            for place, tensor in self._held()
            if not _is_inexact(tensor)
        ]

    def _held(self) -> list[tuple[_Place, Tensor]]:
        found = [(place, place.holder.get(place.key)) for place in self._places]
        return [(place, tensor) for place, tensor in found if tensor is not None]


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _change(place: _Place, now: Tensor, version: int) -> Tensor | int:
    # a large mask that nobody writes to is not read
    if now is place.tensor and now._version == version:
        return 0
    before = _hash(place.value) if place.value is not None else 0
    return ((_hash(now) - before) >> 20) & (2**20 - 1)


def _hash(tensor: Tensor) -> Tensor:
    """Hash the values by their positions, without waiting for the device."""
    first, second, third = _MIX
    values = tensor.detach().reshape(-1).to(torch.int64)
    mixed = values * first + torch.arange(1, values.numel() + 1, device=values.device) * second
    return ((mixed ^ (mixed >> 32)) * third).sum()
