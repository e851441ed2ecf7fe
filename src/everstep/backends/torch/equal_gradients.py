"""Proof, at the first update of each start, that ranks which hold the same elements step them alike."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.optim import Optimizer

from everstep.backends.torch.sharded import is_sharded, layout, local
from everstep.contracts.group import named
from everstep.errors import DisagreementError

_hooks: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
"""Handles of the hooks, of which each waits for a first update or has seen it."""


def prove_first_update(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    """Compare the gradients of an optimizer's next step over the ranks, before the step is made.

    Where several ranks compute with the same samples, nothing averages their gradients: the rank whose
    gradient is another trains a model of its own.  One collective of 8 bytes for each parameter.

    Args:
        optimizer: one that steps the parameters itself, on all ranks.
        names: names of parameters, by identity.
    """

    proven = False

    def compare(stepping: Optimizer, *_: Any) -> None:
        nonlocal proven
        if proven:
            return
        # the hook stays: torch iterates over the hooks here, and cannot go on where one has left
        proven = True
        stepped = [parameter for group in stepping.param_groups for parameter in group["params"]]
        _require_equal(stepped, [names.get(id(p), f"parameter {i}") for i, p in enumerate(stepped)])

    if earlier := _hooks.pop(optimizer, None):
        earlier.remove()
    _hooks[optimizer] = optimizer.register_step_pre_hook(compare)


def _require_equal(parameters: Sequence[Tensor], names: Sequence[str]) -> None:
    """Refuse gradients that are not equal where they have to be; all ranks raise.

    Raises:
        DisagreementError: names the first parameter, and the ranks whose gradients differ.
    """
    device = parameters[0].device
    rows = [[_digest(parameter), _first_holder(parameter)] for parameter in parameters]
    mine = torch.tensor(rows, dtype=torch.int64, device=device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    by_rank = [each.tolist() for each in found]
    for index, name in enumerate(names):
        told = [each[index] for each in by_rank]
        differing = [rank for rank, (digest, holder) in enumerate(told) if digest != told[holder][0]]
        if differing:
            raise DisagreementError(
                f"the gradient of {name!r} on {named(differing)} is not that of rank "
                f"{told[differing[0]][1]}, which holds the same elements, so each would train a model of its "
                "own: give all ranks of tensor parallelism the same first values and the same input, or let "
                "torch reduce the gradient, as a DTensor: by the plan of parallelize_module "
                "(SequenceParallel() for a norm), or by distribute_module(part, mesh['tp'])",
                ranks=differing,
            )


def _first_holder(parameter: Tensor) -> int:
    """Return the first rank that holds the elements that this rank holds."""
    return layout(parameter).holders[0] if is_sharded(parameter) else 0


def _digest(parameter: Tensor) -> int:
    """Digest the elements of a gradient that this process holds: 63 bits, 0 for no gradient."""
    gradient = parameter.grad
    if gradient is None:
        return 0
    if is_sharded(gradient) and is_sharded(parameter):
        # a sum that was not made yet is made here as the optimizer makes it
        gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    elements = local(gradient)
    if elements.is_sparse:
        elements = elements.to_dense()
    data: Any = elements.cpu().contiguous().flatten().view(torch.uint8).numpy()
    return xxhash.xxh3_64_intdigest(data) >> 1
