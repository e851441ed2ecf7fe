"""Comparison of what all ranks must have in common, by digests small enough for a key-value store.

Each rank digests its common part; the writer compares.  Only where a part differs do all ranks digest each of
its leaves, so that the error names the first leaf that differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import numpy as np
import xxhash

from everstep.contracts.state import HostArray
from everstep.errors import StateError
from everstep.state import Encoded, decode, encode, leaves, portable

COMPARED = ("progress", "user", "streams")
"""Branches that are the same on all ranks.  Services: not all ranks run all of them."""
_BY_NAME = ("user", "streams")
"""Branches of which each entry is a part of its own."""
_NOTHING = Encoded({})


def digests(common: Encoded, own: Encoded = _NOTHING, together: Sequence[int] = ()) -> dict[str, str]:
    """Digest each part that all ranks, or some of them, must have in common: xxh3_64, 16 hex digits.

    Args:
        common, own: what `split` leaves.
        together: the ranks that read the same part of the data as this one, which is among them.

    Returns:
        By part: "progress", "user/NAME", "streams/NAME"; and of what ranks 0 and 2 alone hold both,
        "user/NAME#0,2", "rng#0,2".
    """
    totals: dict[str, Any] = {}
    for part, path, data in _compared(common, own, together):
        total = totals.setdefault(part, xxhash.xxh3_64())
        total.update(f"{len(path)} {len(data)} {path}".encode())
        total.update(data)
    return {part: total.hexdigest() for part, total in totals.items()}


def leaf_digests(
    common: Encoded, part: str, own: Encoded = _NOTHING, together: Sequence[int] = ()
) -> dict[str, str]:
    """Digest each leaf of a part, by its path; a path that ends with "#" has the form of what is there."""
    found = _compared(common, own, together)
    return {path: xxhash.xxh3_64_hexdigest(data) for name, path, data in found if name == part}


def differing(ranks: Sequence[Mapping[str, str]]) -> str | None:
    """Find the first name whose digest is not the same on all ranks; None if there is no such name."""
    first = ranks[0]
    names = dict.fromkeys(name for found in ranks for name in found)
    return next((name for name in names if any(r.get(name) != first.get(name) for r in ranks)), None)


def difference(part: str, ranks: Sequence[Mapping[str, str]]) -> StateError:
    """Make the error for a part that differs, given its `leaf_digests` by rank."""
    branch_and_name, _, holders = part.partition("#")
    telling = list(map(int, holders.split(","))) if holders else list(range(len(ranks)))
    path = differing([dict(sorted(ranks[rank].items())) for rank in telling]) or part
    first = ranks[telling[0]].get(path)
    others = ", ".join(str(rank) for rank in telling if ranks[rank].get(path) != first)
    where = f"{unquote(path.partition('#')[0])!r} of rank {others}"
    whose = f"rank {telling[0]}" if telling[0] else "the writer"
    branch, _, name = branch_and_name.partition("/")
    what, remedy = _REMEDIES.get(branch, _REMEDIES["progress"])
    name = unquote(name)
    return StateError(
        f"{what.format(name)} is not the same on all ranks: {where} is not that of {whose}; "
        f"{remedy.format(name)}"
    )


_REMEDIES = {
    "user": (
        "state entry {0!r}",
        "declare what is each rank's own, as in state={{{0!r}: everstep.PerRank(...)}}; wrap a model that is "
        "trained, model = everstep.torch.parallel(model); what else changes must change equally on all ranks",
    ),
    "streams": ("stream {0!r}", "give all ranks the same data, and generators in equal states"),
    "progress": ("the place in the run", "run the same loop on all ranks, under the same conditions"),
    "rng": (
        "the random state of ranks that compute with the same samples (data_ranks=)",
        "let them draw equally many random numbers in each step: dropout of what these ranks divide needs "
        "parts of equal size, or a torch.Generator of its own",
    ),
}


def _compared(common: Encoded, own: Encoded, together: Sequence[int]) -> Iterator[tuple[str, str, Any]]:
    yield from _leaves(common)
    yield from _copies(common)
    if len(together) > 1:
        yield from _random(own, ",".join(map(str, together)))


def _random(own: Encoded, holders: str) -> Iterator[tuple[str, str, Any]]:
    """Yield (part, path, bytes) of a rank's random state, without the number of the rank."""
    structure: Any = own.structure
    now = next(name for name in structure["rng"] if name.startswith("rank"))
    # a rank that sees all devices draws on its own alone: on the others the ranks' states differ
    state = portable(decode(Encoded(structure["rng"][now], own.arrays)))
    for path, data in leaves(encode({"rng": state})):
        yield f"rng#{holders}", f"{path}#{holders}", data


def _leaves(common: Encoded) -> Iterator[tuple[str, str, Any]]:
    structure: Any = common.structure
    compared = {branch: structure[branch] for branch in COMPARED if branch in structure}
    arrays = {name: _anywhere(array) for name, array in common.arrays.items()}
    for path, data in leaves(Encoded(compared, arrays)):
        branch, _, rest = path.rstrip("#").partition("/")
        name = rest.partition("/")[0]
        yield f"{branch}/{name}" if branch in _BY_NAME and name else branch, path, data


def _copies(common: Encoded) -> Iterator[tuple[str, str, Any]]:
    """Yield (part, path, bytes) of the boxes of large arrays that some ranks hold alike, sorted by path."""
    for name, array in sorted(common.arrays.items()):
        branch, _, rest = name.partition("/")
        if branch in _BY_NAME and array.region is not None and len(array.region.holders) > 1:
            holders = ",".join(map(str, array.region.holders))
            yield f"{branch}/{rest.partition('/')[0]}#{holders}", f"{name}#{holders}", array.data


def _anywhere(array: HostArray) -> HostArray:
    """Leave out what is each rank's own: the device, and of a large array the box that the rank holds."""
    extra = {key: fact for key, fact in array.extra.items() if key != "device"}
    if array.region is None:
        return array if len(extra) == len(array.extra) else array.with_extra(extra)
    return HostArray(array.dtype, array.region.whole, np.empty(0, np.uint8), array.backend, extra)
