"""Digest of a batch as it is handed out: cheap enough for every step, and equal for equal batches.

The digest of an array in host memory covers its type, its shape and all its elements; above 64 KiB its first
and last 2 KiB and elements evenly spaced between them (64; in a large array, an element for each 16 KiB, up
to 1,024); of a long list its first and last 32 items.  Neither the memory layout of an array (a worker
makes it contiguous) nor the order of a dict changes it.  Of an object of another class count the arrays and
containers in its attributes, three objects deep, not its numbers and strings, which may be of this process.
Arrays on a device are left out: the digest waits for no device.

Each step comes here with cold caches, so each call costs.  Whoever changes a digest changes `trail.VERSION`.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from itertools import islice, repeat
from logging import Logger
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from everstep import backends
from everstep.backends.numpy import WHOLE, layout_number
from everstep.contracts.state import Backend

EDGE = 2048
"""Bytes at either end of a larger array; the digest covers all of them."""
_BETWEEN = 64
_ITEMS = 32
_DEPTH = 16
_ROOM = 1 << 24
"""Bytes of the arrays of data that a digest covers as a whole; of larger ones as of a batch's."""
_MOST_OBJECTS, _MOST_NUMBERS = 256, 1 << 14
"""Objects that are looked at for arrays, and numbers of a list that are taken, evenly spaced."""

_hash: Callable[..., int] = xxhash.xxh3_64_intdigest


Handler: TypeAlias = Callable[[Any, int, int], int | None]
"""(value, seed, depth) -> the digest; None where the value gives nothing to digest."""


def batch_digest(batch: Any, start: int, depth: int = 0) -> int | None:
    """Return a 64-bit digest, or None where the batch gives nothing to digest.

    No code of the batch's own classes runs, so taking the digest changes nothing.

    Args:
        batch: arrays, numbers, strings, in lists, tuples, dictionaries and dataclasses, nested.
    """
    kind = type(batch)
    return (_HANDLERS.get(kind) or _handler(kind, batch))(batch, start, depth)


def _handler(kind: type, value: Any) -> Handler:
    """Choose the handler for a type, once: a subclass is digested as its base, whatever its methods do."""
    handler: Handler = _unknown
    if (backend := backends.of(value)) is not None:
        handler = partial(_of_array, backend)
        _DIGEST_SMALL[kind] = backend.digest_small
    elif is_dataclass(kind):
        handler = _of_dataclass
    else:
        bases = {list: _of_sequence, tuple: _of_sequence, dict: _of_dict, UserDict: _of_user_dict}
        other = _of_object if hasattr(value, "__dict__") and not issubclass(kind, _CODE) else _unknown
        handler = next((each for base, each in bases.items() if issubclass(kind, base)), other)
    _HANDLERS[kind] = handler
    return handler


def _of_array(backend: Backend, value: Any, seed: int, depth: int) -> int | None:
    small, count = backend.digest_small((value,), seed)
    if count:
        return small
    array = backend.host_view(value)
    return None if array is None else array_digest(array, seed)


def data_digest(parts: Sequence[Any]) -> int | None:
    """Return a digest of the arrays and lists of numbers and strings that data holds; None if there are none.

    They are found in attributes of the parts and of datasets, in lists, and under names in dictionaries.  A
    list with None, or a dictionary by number, may be a cache that fills, and is left out.  Of a path counts
    the file's name, as the folder may be another one; of a pandas frame, rows evenly spaced; of a Hugging
    Face dataset, the choice of its rows, as a shuffle or a split makes it.
    """
    budget, numbers, digest, stack, visited = _ROOM, _MOST_NUMBERS, 0, [*parts], dict[int, Any]()
    while stack and len(visited) < _MOST_OBJECTS:
        value = stack.pop()
        kind, is_visited, visited[id(value)] = type(value), id(value) in visited, value
        if is_visited or kind is np.memmap:  # to read a file may take long
            continue
        if (backend := backends.of(value)) is not None:
            with suppress(Exception):  # of a kind without plain elements
                view, fits = backend.host_view(value), value.nbytes <= budget
                if view is None and fits:
                    view = backend.to_host(value, None).data
                content: Any = np.ascontiguousarray(view) if fits else view
                digest = _hash(content, digest) if fits else array_digest(content, digest) or digest
                budget -= value.nbytes * fits
        elif kind in (list, tuple):
            items = value[:: len(value) // _MOST_OBJECTS + 1]
            if {*map(type, items)} <= {int, float}:
                digest = _hash(repr(value[:: len(value) // numbers + 1]).encode(), digest)
                numbers = max(numbers - len(value), _ITEMS)
            elif {*map(type, items)} <= {int, float, str}:
                names = [each[-64:].rpartition("/")[2] if type(each) is str else each for each in items]
                digest = _hash(repr(names).encode("utf-8", "surrogatepass"), digest)
            elif all(each is not None for each in items):
                stack += items
        elif kind is dict:
            stack += [value[name] for name in islice(value, _MOST_OBJECTS) if isinstance(name, str)]
        elif hasattr(kind, "iloc"):
            with suppress(Exception):  # of a kind that only looks like a frame
                stack.append(value.iloc[:: len(value) // _MOST_OBJECTS + 1].to_numpy().ravel().tolist())
        elif hasattr(indices := getattr(value, "_indices", Any), "fast_slice"):
            stack.append(indices.fast_slice(0, _MOST_NUMBERS)["indices"].to_numpy())
        elif not callable(value) and (hasattr(kind, "__getitem__") or any(value is each for each in parts)):
            stack += getattr(value, "__dict__", {}).values()
    return digest or None


def array_digest(array: NDArray[Any], seed: int) -> int | None:
    """Return the digest of an array in host memory; None if elements have bytes beside their values."""
    number = layout_number(array.dtype, array.shape)
    if number is None:
        return None
    seed ^= number
    if array.nbytes <= WHOLE:
        return _hash(array if array.flags.c_contiguous else array.copy("C"), seed)
    # An array with another layout is read through `flat`: a copy would cost as much as the array.
    items: Any = array.reshape(-1) if array.flags.c_contiguous else array.flat
    edge = EDGE // array.itemsize
    count = max(_BETWEEN, min(array.nbytes >> 14, 16 * _BETWEEN))
    between = items[edge : -edge : (array.size - 2 * edge) // count + 1].tobytes()
    return _hash(items[-edge:].copy(), _hash(between, _hash(items[:edge].copy(), seed)))


def _of_sequence(value: Any, seed: int, depth: int) -> int | None:
    base: Any = list if isinstance(value, list) else tuple
    return _of_items(base.__getitem__(value, slice(None)), seed, depth)


def _of_items(items: Sequence[Any], seed: int, depth: int) -> int | None:
    """Digest the items that can be digested; None if there are items and none can be."""
    if depth >= _DEPTH:
        return None
    count = len(items)
    if count > 2 * _ITEMS:
        items = (*items[:_ITEMS], *items[-_ITEMS:])
    elif not count:
        return _hash(_OPENINGS[0], seed)
    seed = _hash(_OPENINGS[count] if count <= 2 * _ITEMS else b"items%d" % count, seed)
    handled = 0
    if (digest_small := _DIGEST_SMALL.get(type(items[0]))) is not None:
        seed, handled = digest_small(items, seed)
        if handled == count:  # as with nearly all batches
            return seed
    digests = handled > 0
    for item in items[handled:]:
        digest = batch_digest(item, seed, depth + 1)
        digests = digests or digest is not None
        seed = seed ^ 1 if digest is None else digest
    return seed if digests else None


def _of_dict(value: Any, seed: int, depth: int) -> int | None:
    keys = tuple(dict.keys(value))
    if set(map(type, keys)) != {str}:  # before the keys are hashed: their own code must not run
        return _of_pairs(list(dict.items(value)), seed, depth)
    order, opening = _in_order(keys)
    return _of_items([*map(dict.__getitem__, repeat(value), order)], _hash(opening, seed), depth)


@lru_cache(maxsize=1024)
def _in_order(keys: tuple[str, ...]) -> tuple[list[str], bytes]:
    """Sort the keys of a dict: a dict made from a set has another order in each process."""
    order = sorted(keys)
    return order, repr(order).encode()


def _of_user_dict(value: Any, seed: int, depth: int) -> int | None:
    content = vars(value).get("data")
    return _of_dict(content, seed, depth) if isinstance(content, dict) else None


def _of_dataclass(value: Any, seed: int, depth: int) -> int | None:
    attributes = getattr(value, "__dict__", {})
    return _of_pairs([(each.name, attributes.get(each.name)) for each in fields(value)], seed, depth)


def _of_object(value: Any, seed: int, depth: int) -> int | None:
    """Digest the attributes that hold arrays, as of torch_geometric's Data, detectron2's Instances."""
    digests, below = False, depth + _DEPTH // 3
    attributes = vars(value) if below <= _DEPTH else {}
    for name in sorted(name for name, part in attributes.items() if type(part) not in _SCALARS):
        digest = batch_digest(attributes[name], seed, below)
        if digest is not None:
            seed, digests = _hash(name.encode(), digest), True
    return seed if digests else None


def _of_pairs(pairs: Sequence[tuple[Any, Any]], seed: int, depth: int) -> int | None:
    keys: list[Any] = [key for key, _ in pairs]
    if not all(isinstance(key, str | int) for key in keys):
        keys = []
    return _of_items([value for _, value in pairs], _hash(repr(keys).encode(), seed), depth)


def _of_bytes(value: Any, seed: int, depth: int) -> int:
    if len(value) > 2 * EDGE:
        return _hash(bytes(value[-EDGE:]), _hash(bytes(value[:EDGE]), seed ^ len(value)))
    return _hash(bytes(value), seed)


def _unknown(value: Any, seed: int, depth: int) -> None:
    return None


_CODE = (type, ModuleType, FunctionType, MethodType, Logger)
_SCALARS = frozenset({int, float, complex, bool, str, bytes, type(None)})
_OPENINGS = [b"items%d" % count for count in range(2 * _ITEMS + 1)]
_DIGEST_SMALL: dict[type, Callable[[Sequence[Any], int], tuple[int, int]]] = {}
"""`Backend.digest_small` by the types of arrays that have come."""
_HANDLERS: dict[type, Handler] = {
    list: _of_items,
    tuple: _of_items,
    dict: _of_dict,
    str: lambda text, seed, depth: _of_bytes(text.encode("utf-8", "surrogatepass"), seed, depth),
    bytes: _of_bytes,
    bytearray: _of_bytes,
    **dict.fromkeys(
        (int, float, complex, bool, type(None)), lambda value, seed, depth: _hash(repr(value).encode(), seed)
    ),
}
