"""Comparison of the samples themselves over the ranks: each rank reads its part of the same global batches.

Looked at is what lies in memory as an attribute of the data.  None of its code runs: to fetch a sample may
draw random numbers, count, or read a disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any

from everstep import backends
from everstep.contracts.data import Stream
from everstep.contracts.group import DataRanks, Group, named
from everstep.errors import DisagreementError
from everstep.record import batch_digest

_DEPTH = 6
_ITEMS = 1000
"""Items of a dictionary up to which it is looked at: two ranks may have made it in different orders."""
_EDGE = 32
"""Items at either end of a list that are looked at; the digest of an array takes elements of all of it."""


def require_same_samples(group: Group, stream: Stream, name: str) -> None:
    """Require that the samples of a stream are the same on all ranks; called by all of them."""
    digests = group.gather(samples(stream), f"the samples of stream {name!r}")
    for path in sorted({path for theirs in digests for path in theirs}):
        differing = [rank for rank, theirs in enumerate(digests) if theirs.get(path) != digests[0].get(path)]
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


def samples(stream: Stream) -> dict[str, str]:
    """Digest what lies in memory of the samples: 16 hex digits, by the path of the attribute."""
    digests: dict[str, str] = {}
    seen = {id(stream)}

    def walk(path: str, value: Any, depth: int) -> None:
        digest = batch_digest(_edges(value), len(value)) if _is_table(value) else None
        if digest is not None:
            digests[path] = f"{digest:016x}"
        elif depth and id(value) not in seen:
            seen.add(id(value))
            for place, part in _parts(value):
                walk(path + place, part, depth - 1)

    for name, part in vars(stream).items():
        walk(name.lstrip("_"), part, _DEPTH)
    return digests


def _is_table(value: Any) -> bool:
    return type(value) in (list, tuple, range) or (backends.of(value) is not None and len(value.shape) > 0)


def _edges(value: Any) -> Any:
    """Return what is looked at of a table; of files the names, as machines may have them elsewhere."""
    if type(value) is str or isinstance(value, PurePath):
        return str(value).rpartition("/")[2]
    if type(value) not in (list, tuple, range):
        return value
    return [_edges(each) for each in (*value[:_EDGE], *value[max(_EDGE, len(value) - _EDGE) :])]


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
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
