"""Functions of torch for the task of a parameter tree (compat/tfutils)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from everstep.backends.torch.optimizers import Around, Clip
from everstep.errors import ConfigError, nearest


def inputs(batch: Mapping[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """Turn a batch's NumPy arrays into tensors, and move all tensors to the model's device."""
    first: Tensor | None = next(model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    moved = dict(batch)
    for name, part in batch.items():
        if isinstance(part, np.ndarray) and part.dtype.kind in "biuf":
            part = torch.from_numpy(part)
        if isinstance(part, Tensor):
            moved[name] = part.to(device, non_blocking=True)
    return moved


def optimizer(
    model: torch.nn.Module,
    make: Callable[..., Optimizer],
    arguments: Mapping[str, Any],
    *,
    inner: Callable[..., Optimizer] | None = None,
    clip: bool | Mapping[str, Any] | None = None,
    names: str | Sequence[str] | None = None,
) -> Optimizer:
    """Make the optimizer that `optimizer_params` describe.

    `inner` makes an optimizer that `make` wraps, as tfutils' ClipOptimizer does.  `clip` has the arguments of
    `Clip`; False leaves the wrapper out.
    """
    parameters = _trained(model, names)
    if inner is None:
        return make(parameters, **arguments)
    base = inner(parameters, **arguments)
    if isinstance(clip, Mapping):
        return make(base, Clip(**clip))
    return base if clip is False else make(base)


def _trained(model: torch.nn.Module, names: str | Sequence[str] | None) -> list[Tensor]:
    """Return the parameters whose names contain one of `names`, and freeze the others; None for all."""
    parameters = dict(model.named_parameters())
    if names is None:
        return list(parameters.values())
    names = [names] if isinstance(names, str) else names
    for name in names:
        if not any(name in each for each in parameters):
            raise ConfigError(
                f"trainable_names: no parameter has {name!r} in its name; {nearest(name, parameters)}"
            )
    for each, parameter in parameters.items():
        parameter.requires_grad_(any(name in each for name in names))
    return [parameter for parameter in parameters.values() if parameter.requires_grad]


def parts(batch: Mapping[str, Any], size: int | None) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield the minibatches of a batch, of `size` samples or fewer, each with its share of the batch.

    The first value gives the number of samples.  A value with another number of rows, such as weights of
    classes, is whole in each minibatch.  Without a size, the batch itself is the only minibatch.
    """
    if size is None:
        yield dict(batch), 1.0
        return
    count = len(next(iter(batch.values())))
    columns = {name: v for name, v in batch.items() if isinstance(v, Tensor | np.ndarray | list | tuple)}
    cut = {name for name, v in columns.items() if getattr(v, "ndim", 1) and len(v) == count}
    for begin in range(0, count, size):
        end = min(begin + size, count)
        part = {name: value[begin:end] if name in cut else value for name, value in batch.items()}
        yield part, (end - begin) / count


def train(
    optimizer: Optimizer,
    loss: Callable[[dict[str, Any]], Mapping[str, Any]],
    batch: Mapping[str, Any],
    minibatch_size: int | None,
) -> dict[str, Any]:
    """Update with the mean of the gradients over a batch; returns its metrics, which are means, too."""
    optimizer.zero_grad()
    sums: dict[str, Any] = {}
    for part, share in parts(batch, minibatch_size):
        metrics = loss(part)
        torch.autograd.backward(metrics["loss"] * share)
        for name, value in metrics.items():
            number = value.detach() if isinstance(value, Tensor) else value
            sums[name] = sums.get(name, 0.0) + number * share
    optimizer.step()
    return sums | optimizer.metrics() if isinstance(optimizer, Around) else sums


def mean(value: Any) -> Any:
    """Return the mean of a tensor with several elements; other values are returned as they are."""
    return value.float().mean() if isinstance(value, Tensor) and value.numel() != 1 else value
