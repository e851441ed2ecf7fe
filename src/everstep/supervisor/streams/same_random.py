"""Random numbers where a run begins: of each part of the data their own, equal on all ranks that read it."""

from __future__ import annotations

from typing import Any

import numpy as np

from everstep.contracts.group import Group
from everstep.contracts.state import HostArray
from everstep.state import Encoded, capture, decode, encode, portable, rekey, restore


def begin_random(group: Group, seed: int) -> None:
    """Set the global generators of this rank, from the seed of the run; called by all ranks.

    Ranks that read the first part draw what one process draws: with the writer's state, as it is before.
    """
    told = None
    if not group.data.in_order:
        # before the writer, which may read any part, gets the generators of its own
        told = group.share(_told() if group.writer else None, "the random state of the writer")
    rekey(seed, group.data_rank)
    if told is not None and group.data_rank == 0 and not group.writer:
        restore(_heard(*told))


def _told() -> list[Any]:
    """Return the global random state as JSON: some 20 KB."""
    state = encode(portable(capture()))
    arrays = {
        name: [array.dtype, array.shape, array.data.tobytes().hex(), array.backend, array.extra]
        for name, array in state.arrays.items()
    }
    return [state.structure, arrays]


def _heard(structure: Any, arrays: dict[str, list[Any]]) -> Any:
    found = {}
    for name, (dtype, shape, data, backend, extra) in arrays.items():
        raw = np.frombuffer(bytearray.fromhex(data), np.uint8)
        found[name] = HostArray(dtype, tuple(shape), raw, backend, extra)
    return decode(Encoded(structure, found))
