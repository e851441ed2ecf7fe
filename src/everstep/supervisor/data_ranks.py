"""The argument `data_ranks`: which ranks read the same part of each batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from everstep import backends
from everstep.contracts.group import DataRanks, Group, named
from everstep.errors import ConfigError, DisagreementError

_FORMS = (
    "give a mesh over the ranks that read different samples, as in data_ranks=mesh['dp']; a pair "
    "(data rank, number of data ranks); or 1, where all ranks read the whole batch"
)


class Said(NamedTuple):
    """What one rank says of the data that it reads.

    Attributes:
        place: number of its part; None where it is not in the mesh that was given.
        size: number of parts.
        row: the ranks of the mesh, in the order of their parts; None without a mesh.
    """

    place: int | None
    size: int
    row: Sequence[int] | None = None


def said(given: Any) -> Said | None:
    """Read a `data_ranks=` argument; None where it is left out, and each rank reads a part of its own.

    Raises:
        ConfigError: the argument has another form, or is out of range.
    """
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
    """Settle which part of each batch every rank of a group reads; called by all of them.

    Args:
        mine: this rank's argument `data_ranks`.

    Raises:
        DisagreementError: the ranks have said different things.
        ConfigError: the parts are not read by equally many ranks, or a mesh is not made of these ranks.
    """
    # also on one process, where more than one part is refused
    group.data = _agreed(group.gather(None if mine is None else list(mine), "the argument data_ranks"))


def _agreed(found: Sequence[Sequence[Any] | None]) -> DataRanks:
    """Make the data ranks of what all ranks have said: `Said` as JSON, or None, in the order of ranks."""
    told = [None if each is None else Said(*each) for each in found]
    everyone = range(len(told))
    if told == [None] * len(told):
        return DataRanks(everyone)
    sizes = [None if each is None else each.size for each in told]
    if differing := [rank for rank in everyone if sizes[rank] != sizes[0]]:
        raise DisagreementError(
            f"data_ranks= has {_parts(sizes[0])} on rank 0, and {_parts(sizes[differing[0]])} on "
            f"{named(differing)}; give all ranks the same mesh or number of data ranks",
            ranks=differing,
        )
    parts = [each for each in told if each is not None]
    for rank, each in enumerate(parts):
        if each.row is not None and not _fits(each, rank, parts):
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
    return DataRanks([each.place or 0 for each in parts])


def _fits(mine: Said, rank: int, parts: Sequence[Said]) -> bool:
    """Whether the ranks of a row have the same row, and stand in it at their places."""
    row = mine.row or ()
    if rank not in row or max(row) >= len(parts):
        return False
    return all(
        parts[other].place == place and parts[other].row == mine.row for place, other in enumerate(row)
    )


def _parts(size: int | None) -> str:
    return "no value" if size is None else f"{size} part{'s' if size > 1 else ''}"
