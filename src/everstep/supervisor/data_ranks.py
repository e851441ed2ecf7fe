"""Ranks that read the same part of each batch: the argument `data_ranks`, and random numbers of each part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from everstep import backends
from everstep.contracts.group import DataRanks, Group, named
from everstep.contracts.state import HostArray
from everstep.errors import ConfigError, DisagreementError
from everstep.state import Encoded, capture, decode, encode, portable, rekey, restore

_FORMS = (
    "give a mesh over the ranks that read different samples, as in data_ranks=mesh['dp']; a pair "
    "(data rank, number of data ranks); or 1, where all ranks read the whole batch"
)


class Said(NamedTuple):
    place: int | None
    """Number of its part; None where it is not in the mesh that was given."""
    size: int
    row: Sequence[int] | None = None
    """The ranks of the mesh, in the order of their parts."""


def said(given: Any) -> Said | None:
    """Read a `data_ranks=` argument; None where it is left out, and each rank reads a part of its own."""
    if given is None:
        return None
    pair = (0, given) if type(given) is int else given
    if isinstance(pair, tuple | list) and [type(each) for each in pair] == [int, int]:
        place, size = pair
        # another number alone does not say which rank reads which part
        if 0 <= place < size and (size == 1 or pair is given):
            return Said(place, size)
    for backend in backends.active():
        if (row := backend.mesh(given)) is not None:
            place, ranks = row
            return Said(place, len(ranks), ranks)
    raise ConfigError(f"data_ranks={given!r:.200}: {_FORMS}")


def divide(group: Group, mine: Said | None) -> None:
    """Settle which part of each batch every rank of a group reads; called by all of them."""
    # also on one process, where more than one part is refused
    answers = group.gather(None if mine is None else list(mine), "the argument data_ranks")
    if not any(answers):
        group.data = DataRanks(range(len(answers)))
        return
    sizes = [answer and Said(*answer).size for answer in answers]
    if differing := [rank for rank, size in enumerate(sizes) if size != sizes[0]]:
        raise DisagreementError(
            f"data_ranks= has {_parts(sizes[0])} on rank 0, and {_parts(sizes[differing[0]])} on "
            f"{named(differing)}; give all ranks the same mesh or number of data ranks",
            ranks=differing,
        )
    parts = [Said(*answer) for answer in answers]
    for rank, each in enumerate(parts):
        if each.row is not None and not _fits(each.row, rank, parts):
            raise ConfigError(
                f"data_ranks= of rank {rank} is a mesh of the {named(each.row)}, which does not fit the "
                f"{len(parts)} ranks of this run: make one mesh over all of them, as in mesh = "
                'init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp")), and give mesh["dp"]'
            )
    counts = [sum(each.place == part for each in parts) for part in range(parts[0].size)]
    if len(set(counts)) > 1:
        listed = ", ".join(f"{part} of {count}" for part, count in enumerate(counts))
        raise ConfigError(
            f"data_ranks=: each data rank from 0 to {len(counts) - 1} must be that of equally many of the "
            f"{len(parts)} ranks, and it is {listed}; {_FORMS}"
        )
    group.data = DataRanks([each.place or 0 for each in parts])


def _fits(row: Sequence[int], rank: int, parts: Sequence[Said]) -> bool:
    """Whether the ranks of a row have the same row, and stand in it at their places."""
    if rank not in row or max(row) >= len(parts):
        return False
    return all(parts[each].place == place and parts[each].row == row for place, each in enumerate(row))


def _parts(size: int | None) -> str:
    return "no value" if size is None else f"{size} part{'s' if size > 1 else ''}"


def begin_random(group: Group, seed: int) -> None:
    """Set the global generators of this rank, from the seed of the run and the part of the data it reads.

    Ranks that read the first part draw what one process draws, from the writer's state.
    """
    shared = None
    if not group.data.in_order:
        # before the writer, which may read any part, gets generators of its own
        state = encode(portable(capture()))
        arrays = {
            name: [array.dtype, array.shape, array.data.tobytes().hex(), array.backend, array.extra]
            for name, array in state.arrays.items()
        }
        mine = [state.structure, arrays] if group.writer else None
        shared = group.share(mine, "the random state of the writer")
    rekey(seed, group.data_rank)
    if shared is not None and group.data_rank == 0 and not group.writer:
        structure, arrays = shared
        host = {
            name: HostArray(
                dtype, tuple(shape), np.frombuffer(bytearray.fromhex(data), np.uint8), backend, extra
            )
            for name, (dtype, shape, data, backend, extra) in arrays.items()
        }
        restore(decode(Encoded(structure, host)))
