"""Division of an encoded tree into what all ranks have in common and what is a rank's own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeAlias

from everstep.contracts.state import Json
from everstep.errors import RestoreError
from everstep.state.codec import Encoded, array_name, decode, encode

Path: TypeAlias = tuple[str, ...]
"""Keys of the dictionaries that lead to a part of a tree."""


def split(encoded: Encoded, own: Collection[Path]) -> tuple[Encoded, Encoded]:
    """Split a tree into the rest and the parts at the paths in `own`; `merge` puts both together.

    No array is copied.  A path that leads nowhere gives nothing.
    """
    rest, taken = _split(encoded.structure, own)
    inside = within(own)
    arrays: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for name, array in encoded.arrays.items():
        arrays[inside(name)][name] = array
    return Encoded(rest, arrays[0]), Encoded(taken, arrays[1])


def within(paths: Iterable[Path]) -> Callable[[str], bool]:
    """Return a function that tells by an array's name whether the array is at one of the paths, or below."""
    names = tuple(array_name(path) for path in paths)
    below = tuple(f"{name}/" for name in names)
    return lambda name: name in names or name.startswith(below)


def merge(common: Encoded, own: Encoded) -> Encoded:
    """Put the two results of `split` together; only the order of keys may differ from before."""
    if own.structure == {}:
        return common
    return Encoded(_merge(common.structure, own.structure, ()), {**common.arrays, **own.arrays})


def with_regions(own: Encoded, common: Encoded) -> Encoded:
    """Return all that a rank alone can lose: its own tree, and its boxes of arrays that the ranks share."""
    sharded = {name: array for name, array in common.arrays.items() if array.region is not None}
    if not sharded:
        return own
    structure: Any = own.structure
    boxes = {name: {"$array": name} for name in sharded}
    return Encoded({**structure, "boxes": boxes}, {**own.arrays, **sharded})


def children(node: Json) -> Mapping[Any, Json] | None:
    """Return the items of an encoded plain dictionary; None for any other node."""
    if not isinstance(node, dict):
        return None
    if "$dict" in node:
        return {decode(Encoded(key)): child for key, child in node["$dict"]}
    return None if any(key.startswith("$") for key in node) else node


def _split(node: Json, own: Collection[Path]) -> tuple[Json, Json]:
    items = children(node)
    if items is None:
        return node, {}
    rest, taken = {}, {}
    for key, child in items.items():
        inside = [path[1:] for path in own if path[:1] == (key,)]
        if () in inside:
            taken[key] = child
            continue
        rest[key], part = _split(child, inside) if inside else (child, None)
        if part:
            taken[key] = part
    return _node(rest), _node(taken)


def _merge(common: Json, own: Json, path: tuple[str, ...]) -> Json:
    branches, own_branches = children(common), children(own)
    if branches is None or own_branches is None:
        raise RestoreError(
            f"{'/'.join(path) or 'the tree'} is in the common part and in a rank's own part: the checkpoint "
            "was written by another program; resume from another one"
        )
    more = {
        key: _merge(branches[key], child, (*path, str(key))) if key in branches else child
        for key, child in own_branches.items()
    }
    return _node({**branches, **more})


def _node(items: Mapping[Any, Json]) -> Json:
    shell: Any = encode(dict.fromkeys(items)).structure
    if "$dict" in shell:
        keys = (key for key, _ in shell["$dict"])
        return {"$dict": [[key, child] for key, child in zip(keys, items.values(), strict=True)]}
    return dict(items)
