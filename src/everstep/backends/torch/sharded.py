"""Tensors of which each process of a group holds a part: refused by name, as long as one process trains."""

from __future__ import annotations

import sys

from torch import Tensor

from everstep.errors import StateError


def refuse_sharded(tensor: Tensor, what: str) -> None:
    """Refuse a DTensor, as `fully_shard` makes them of parameters.

    Raises:
        StateError: names `what`.
    """
    home = sys.modules.get("torch.distributed.tensor")  # importing it takes a second
    if home is not None and isinstance(tensor, home.DTensor):
        raise StateError(
            f"{what} is sharded over processes (fully_shard), and everstep saves what one process holds: "
            "give the module as it is, without fully_shard, and train it in one process"
        )
