"""Comparison of the samples themselves over the ranks: each rank reads its part of the same global batches.

Looked at is what lies in memory: arrays, and lists of numbers, strings and arrays, that the data and the
datasets inside it have as attributes.  No code of theirs runs: to fetch a sample may draw random numbers,
count, or read a disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """Require that the samples of a stream are the same on all ranks; called by all of them.

    Raises:
        DisagreementError: names the attribute, and the ranks.
    """
    found = group.gather(samples(stream), f"the samples of stream {name!r}")
    paths = sorted({path for theirs in found for path in theirs})
    for path in paths:
        differing = [rank for rank, theirs in enumerate(found) if theirs.get(path) != found[0].get(path)]
        if differing:
            raise DisagreementError(
                f"the samples of stream {name!r} are not the same on all ranks: {path} of "
                f"{named(differing)} differs from the writer's; give all ranks the same data in the same "
                "order (random_split with a generator of a fixed seed, sorted(os.listdir(...))): the loop "
                "hands each rank its part",
                ranks=differing,
            )


def require_alike(data: DataRanks, digests: Sequence[Any], what: str) -> None:
    """Require that ranks with the same part of the data have the same digest, given in the order of ranks.

    Raises:
        DisagreementError: names the ranks.
    """
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
    found: dict[str, str] = {}
    above = {id(stream)}

    def walk(holder: dict[str, Any], path: str, depth: int) -> None:
        for name, value in holder.items():
            where = f"{path}.{str(name).lstrip('_')}".lstrip(".")
            digest = batch_digest(_table(value), len(value)) if _is_table(value) else None
            if digest is not None:
                found[where] = f"{digest:016x}"
            elif depth < _DEPTH:
                for key, inner in _inside(value):
                    if id(inner) not in above:
                        above.add(id(inner))
                        walk(inner if type(inner) is dict else vars(inner), f"{where}{key}", depth + 1)

    walk(vars(stream), "", 0)
    return found


def _is_table(value: Any) -> bool:
    """Whether a value is an array with dimensions, or a list."""
    if type(value) in (list, tuple, range):
        return True
    return backends.of(value) is not None and len(value.shape) > 0


def _table(value: Any) -> Any:
    if type(value) not in (list, tuple, range):
        return value
    ends = value if len(value) <= 2 * _EDGE else [*value[:_EDGE], *value[-_EDGE:]]
    return [_item(each) for each in ends]


def _item(value: Any) -> Any:
    """Return an item of a list to digest: machines may have the same files in different folders."""
    if type(value) is str or isinstance(value, PurePath):
        return str(value).rpartition("/")[2]
    if type(value) in (list, tuple):
        return [_item(each) for each in value[:_EDGE]]
    return value


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the datasets that a value is or holds, with their place in it."""
    if type(value) in (list, tuple):
        for at, each in enumerate(value[:_EDGE]):
            if _is_dataset(each):
                yield f"[{at}]", each
    elif type(value) is dict:
        if len(value) <= _ITEMS:
            yield "", value
    elif _is_dataset(value):
        yield "", value


def _is_dataset(value: Any) -> bool:
    """Whether samples are fetched from an object by index, or it holds such an object."""
    if not hasattr(value, "__dict__") or isinstance(value, type):
        return False
    kinds = type(value).__mro__
    if any(kind.__name__ == "IterableDataset" for kind in kinds):
        return False  # each rank may read a part of its own
    by_index = all(any(name in vars(kind) for kind in kinds) for name in ("__getitem__", "__len__"))
    return by_index or "dataset" in vars(value) or isinstance(value, Stream)
