"""Refusal of tensors that are divided among processes: everstep saves the tensors of one process."""

from __future__ import annotations

import sys

from torch import Tensor

from everstep.errors import StateError


def refuse_sharded(tensor: Tensor, what: str) -> None:
    """Refuse a DTensor, which `fully_shard` makes of each parameter.

    Raises:
        StateError: the tensor is a DTensor; names `what`.
    """
    # importing the module takes a second; a program that has not imported it has no DTensor
    home = sys.modules.get("torch.distributed.tensor")
    if home is not None and isinstance(tensor, home.DTensor):
        raise StateError(
            f"{what} is sharded over processes (fully_shard), and everstep saves what one process holds: "
            "give the module as it is, without fully_shard; on several processes wrap it with "
            "everstep.torch.parallel(model)"
        )
