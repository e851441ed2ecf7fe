"""Comparison of what all ranks must have in common, by digests small enough for a key-value store.

Each rank digests its common part; the writer compares.  Only where a part differs do all ranks digest each of
its leaves, so that the error names the first leaf that differs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

import xxhash

from everstep.contracts.state import HostArray
from everstep.errors import StateError
from everstep.state import Encoded, leaves

COMPARED = ("progress", "user", "streams")
"""Branches that are the same on all ranks.  Services: not all ranks run all of them."""
_BY_NAME = ("user", "streams")
"""Branches of which each entry is a part of its own."""


def digests(common: Encoded, skip: Collection[str] = ()) -> dict[str, str]:
    """Digest each part that all ranks must have in common.

    Args:
        common: the rest that `split` leaves.
        skip: paths of leaves that count as the writer's ("user/model/norm.running_mean"): buffers that the
            writer sends to the others before they are used.

    Returns:
        xxh3_64, 16 hex digits, by part: "progress", "user/NAME", "streams/NAME".
    """
    totals: dict[str, Any] = {}
    for part, path, data in _leaves(common, skip):
        total = totals.setdefault(part, xxhash.xxh3_64())
        total.update(f"{len(path)} {len(data)} {path}".encode())
        total.update(data)
    return {part: total.hexdigest() for part, total in totals.items()}


def leaf_digests(common: Encoded, part: str, skip: Collection[str] = ()) -> dict[str, str]:
    """Digest each leaf of a part, by its path; a path that ends with "#" has the form of what is there."""
    return {path: xxhash.xxh3_64_hexdigest(data) for own, path, data in _leaves(common, skip) if own == part}


def differing(ranks: Sequence[Mapping[str, str]]) -> str | None:
    """Find the first name whose digest is not the same on all ranks; None if there is no such name."""
    first = ranks[0]
    names = dict.fromkeys(name for found in ranks for name in found)
    return next((name for name in names if any(r.get(name) != first.get(name) for r in ranks)), None)


def difference(part: str, ranks: Sequence[Mapping[str, str]]) -> StateError:
    """Make the error for a part that differs.

    Args:
        ranks: `leaf_digests` of the part, by rank.
    """
    path = differing([dict(sorted(found.items())) for found in ranks]) or part
    others = ", ".join(str(n) for n, found in enumerate(ranks) if found.get(path) != ranks[0].get(path))
    where = f"{unquote(path.rstrip('#'))!r} of rank {others}"
    branch, _, name = part.partition("/")
    what, remedy = _REMEDIES.get(branch, _REMEDIES["progress"])
    name = unquote(name)
    return StateError(
        f"{what.format(name)} is not the same on all ranks: {where} is not that of the writer; "
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
}


def _leaves(common: Encoded, skip: Collection[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield (part, path, bytes) of the leaves to compare, sorted by path."""
    structure: Any = common.structure
    compared = {branch: structure[branch] for branch in COMPARED if branch in structure}
    arrays = {name: _anywhere(array) for name, array in common.arrays.items()}
    for path, data in leaves(Encoded(compared, arrays)):
        where = path.rstrip("#")
        if where not in skip:
            branch, _, rest = where.partition("/")
            name = rest.partition("/")[0]
            yield f"{branch}/{name}" if branch in _BY_NAME and name else branch, path, data


def _anywhere(array: HostArray) -> HostArray:
    """Leave out the device, which is each rank's own."""
    if "device" not in array.extra:
        return array
    return replace(array, extra={key: fact for key, fact in array.extra.items() if key != "device"})
