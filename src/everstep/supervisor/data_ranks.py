"""What each rank reads: the argument `data_ranks`, random numbers of each part, equal samples on all ranks.

Compared of the samples is what lies in memory as an attribute of the data.  None of its code runs: to fetch a
sample may draw random numbers, count, or read a disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from everstep import backends
from everstep.contracts.data import Stream
from everstep.contracts.group import DataRanks, Group, named
from everstep.contracts.state import HostArray
from everstep.display.cells import plural
from everstep.errors import ConfigError, DisagreementError
from everstep.record import batch_digest
from everstep.state import Encoded, capture, decode, encode, portable, rekey, restore

_FORMS = (
    "give a mesh over the ranks that read different samples, as in data_ranks=mesh['dp']; a pair "
    "(data rank, number of data ranks); or 1, where all ranks read the whole batch"
)

_DEPTH = 6
_ITEMS = 1000
"""Items of a dictionary up to which it is looked at: two ranks may have made it in different orders."""
_LISTS_ONLY = 12
"""Depth at which a digest begins that looks into no object: ranks may have their files elsewhere."""
_EDGE = 32
"""Items at either end of a list that are looked at; the digest of an array takes elements of all of it."""


class Part(NamedTuple):
    place: int | None
    """Number of its part; None where it is not in the mesh that was given."""
    size: int
    row: Sequence[int] | None = None
    """The ranks of the mesh, in the order of their parts."""


def read_data_ranks(argument: Any) -> Part | None:
    """Read a `data_ranks=` argument; None where it is left out, and each rank reads a part of its own."""
    if argument is None:
        return None
    pair = (0, argument) if type(argument) is int else argument
    if isinstance(pair, tuple | list) and [type(each) for each in pair] == [int, int]:
        place, size = pair
        # another number alone does not say which rank reads which part
        if 0 <= place < size and (size == 1 or pair is argument):
            return Part(place, size)
    for backend in backends.active():
        if (row := backend.mesh(argument)) is not None:
            place, ranks = row
            return Part(place, len(ranks), ranks)
    raise ConfigError(f"data_ranks={argument!r:.200}: {_FORMS}")


def divide(group: Group, own_part: Part | None) -> None:
    """Settle which part of each batch every rank of a group reads; called by all of them."""
    # also on one process, where more than one part is refused
    answers = group.gather(None if own_part is None else list(own_part), "the argument data_ranks")
    if not any(answers):
        group.data = DataRanks(range(len(answers)))
        return
    sizes = [answer and Part(*answer).size for answer in answers]
    if differing := [rank for rank, size in enumerate(sizes) if size != sizes[0]]:
        raise DisagreementError(
            f"data_ranks= has {_parts(sizes[0])} on rank 0, and {_parts(sizes[differing[0]])} on "
            f"{named(differing)}; give all ranks the same mesh or number of data ranks",
            ranks=differing,
        )
    parts = [Part(*answer) for answer in answers]
    for rank, each in enumerate(parts):
        if each.row is not None and not _fits(each.row, rank, parts):
            raise ConfigError(
                f"data_ranks= of rank {rank} is a mesh of the {named(each.row)}, which does not fit the "
                f"{len(parts)} ranks of this run: make one mesh over all of them, as in mesh = "
                'init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp")), and give mesh["dp"]'
            )
    counts = [sum(each.place == part for each in parts) for part in range(parts[0].size)]
    if len(set(counts)) > 1:
        places = ", ".join(f"{part} of {count}" for part, count in enumerate(counts))
        raise ConfigError(
            f"data_ranks=: each data rank from 0 to {len(counts) - 1} must be that of equally many of the "
            f"{len(parts)} ranks, and it is {places}; {_FORMS}"
        )
    group.data = DataRanks([each.place or 0 for each in parts])


def _fits(row: Sequence[int], rank: int, parts: Sequence[Part]) -> bool:
    """Whether the ranks of a row have the same row, and stand in it at their places."""
    if rank not in row or max(row) >= len(parts):
        return False
    return all(parts[each].place == place and parts[each].row == row for place, each in enumerate(row))


def _parts(size: int | None) -> str:
    return "no value" if size is None else plural(size, "part")


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
        message = [state.structure, arrays] if group.writer else None
        shared = group.share(message, "the random state of the writer")
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


def require_same_samples(group: Group, stream: Stream, name: str) -> None:
    """Require that the samples of a stream are the same on all ranks; called by all of them."""
    digests = group.gather(sample_digests(stream), f"the samples of stream {name!r}")
    for path in sorted({path for each in digests for path in each}):
        differing = [rank for rank, each in enumerate(digests) if each.get(path) != digests[0].get(path)]
        if differing:
            raise DisagreementError(
                f"the samples of stream {name!r} are not the same on all ranks: {path} of "
                f"{named(differing)} differs from the writer's; give all ranks the same data in the same "
                "order (random_split with a generator of a fixed seed, sorted(os.listdir(...))): the loop "
                "hands each rank its part",
                ranks=differing,
            )


def require_alike(data: DataRanks, digests: Sequence[Any], what: str) -> None:
    """Require that ranks with the same part of the data have the same digest, given in the order of ranks."""
    if differing := data.unlike(digests):
        together = data.together(differing[0])
        raise DisagreementError(
            f"{what} are not the same on {named(together)}, which read the same part (data_ranks=): those of "
            f"{named([each for each in differing if each in together])} differ from those of rank "
            f"{together[0]}; give these ranks the same data, with generators in equal states",
            ranks=differing,
        )


def sample_digests(stream: Stream) -> dict[str, str]:
    """Digest what lies in memory of the samples: 16 hex digits, by the path of the attribute."""
    digests: dict[str, str] = {}
    seen_ids = {id(stream)}

    def walk(path: str, value: Any, depth: int) -> None:
        is_array = backends.of(value) is not None and len(value.shape) > 0
        is_table = is_array or type(value) in (list, tuple, range)
        digest = batch_digest(_edges(value), len(value), _LISTS_ONLY) if is_table else None
        if digest is not None:
            digests[path] = f"{digest:016x}"
        elif depth and id(value) not in seen_ids:
            seen_ids.add(id(value))
            for place, part in _items(value):
                walk(path + place, part, depth - 1)

    for name, part in vars(stream).items():
        walk(name.lstrip("_"), part, _DEPTH)
    return digests


def _edges(value: Any) -> Any:
    """Return what is looked at of a table; of files the names, as machines may have them elsewhere."""
    if type(value) is str or isinstance(value, PurePath):
        return str(value).rpartition("/")[2]
    if type(value) not in (list, tuple, range):
        return value
    return [_edges(each) for each in (*value[:_EDGE], *value[max(_EDGE, len(value) - _EDGE) :])]


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    """List what a dataset, a list of datasets or a dictionary holds, with the place in it."""
    if type(value) in (list, tuple):
        return [(f"[{at}]", each) for at, each in enumerate(value[:_EDGE]) if _is_dataset(each)]
    holder = value if type(value) is dict and len(value) <= _ITEMS else {}
    if _is_dataset(value):
        holder = vars(value)
    return [(f".{str(name).lstrip('_')}", part) for name, part in holder.items()]


def _is_dataset(value: Any) -> bool:
    """Whether samples are fetched from an object by index, or it holds such an object."""
    if not hasattr(value, "__dict__") or isinstance(value, type):
        return False
    kinds = type(value).__mro__
    if any(kind.__name__ == "IterableDataset" for kind in kinds):
        return False  # each rank may read a part of its own
    by_index = all(any(name in vars(kind) for kind in kinds) for name in ("__getitem__", "__len__"))
    return by_index or "dataset" in vars(value) or isinstance(value, Stream)
