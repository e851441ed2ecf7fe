"""The leaves of an encoded tree as bytes, and digests of them."""

from __future__ import annotations

import operator
import struct
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import xxhash

from everstep.contracts.state import HostArray, Json
from everstep.state.codec import Encoded, component, components, inside, tag_of, text_of

_ITEMS = {"$tuple", "$deque"}
_PAIRS = {"$dict", "$ordered", "$counter", "$defaultdict"}


def leaves(encoded: Encoded) -> Iterator[tuple[str, Any]]:
    """Yield (path, bytes or uint8) of every leaf, by path: equal trees give equal leaves, and only they do.

    An array gives two leaves: its elements at its path, and its form (dtype, shape ...) at path + "#".  The
    kind of a container is at path + "#", too, the kind of a value that a backend packed at path + "##".  The
    order of dict keys makes no difference, nor does `_metadata`, which only tells how to load.
    """
    yield from sorted(_walk(encoded.structure, "", encoded.arrays), key=operator.itemgetter(0))


def content_digest(array: HostArray) -> str:
    """Return the xxh3_128 in hex of an array's bytes; the noted one, where one is noted."""
    return xxhash.xxh3_128_hexdigest(array.data.data) if array.xxh3_128 is None else array.xxh3_128


def note_digests(encoded: Encoded) -> None:
    """Note the digest of each array, so that what follows need not read the arrays again."""
    for array in encoded.arrays.values():
        array.xxh3_128 = content_digest(array)


def digest(encoded: Encoded, skip: Collection[str] = ("wall",)) -> str:
    """Return the xxh3_128 in hex of all leaves, except those whose first path component is in `skip`."""
    total = xxhash.xxh3_128()
    brief = {}  # the elements of an array count by their own digest, which may be noted already
    for name, a in encoded.arrays.items():
        elements = np.frombuffer(bytes.fromhex(content_digest(a)), np.uint8)
        brief[name] = HostArray(a.dtype, a.shape, elements, a.backend, a.extra, a.region)
    for path, data in leaves(Encoded(encoded.structure, brief)):
        if path.split("/", 1)[0].removesuffix("#") not in skip:
            place = path.encode()
            total.update(struct.pack("<QQ", len(place), len(data)) + place)
            total.update(data)
    return total.hexdigest()


def _walk(node: Any, path: str, arrays: Mapping[str, HostArray]) -> Iterator[tuple[str, Any]]:
    tag = tag_of(node)
    if tag == "$array":
        host = arrays[node[tag]]
        form = [host.dtype, list(host.shape), host.backend, host.extra]
        if host.region is not None:
            form += [list(host.region.offset), list(host.region.whole)]
        yield f"{path}#", text_of(form).encode()
        yield path, host.data
    elif tag == "$value":
        yield f"{path}##", text_of([node["backend"], node["kind"]]).encode()
        yield from _walk(node[tag], path, arrays)
    elif tag in _PAIRS or tag in _ITEMS or (tag is None and isinstance(node, (list, dict))):
        children = _children(tag, node if tag is None else node[tag])
        if tag or isinstance(node, list) or not node:
            kind = [tag or type(node).__name__, len(children)]
            about = [node.get("maxlen"), node.get("factory")] if tag else []
            yield f"{path}#", text_of(kind + about).encode()
        below = inside(path)
        for part, item in children:
            yield from _walk(item, below + part, arrays)
    else:
        yield path, text_of(node).encode()


def _children(tag: str | None, body: Any) -> list[tuple[str, Json]]:
    if isinstance(body, dict):
        return [(component(key), item) for key, item in body.items()]
    if tag in _PAIRS:
        return list(zip(components(key for key, _ in body), (item for _, item in body), strict=True))
    return [(str(i), item) for i, item in enumerate(body)]
