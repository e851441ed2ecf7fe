"""Nodes of an encoded tree: their kind, their text, and the components of the paths that lead to them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import lru_cache

from everstep.contracts.state import Json


def tag_of(node: Json) -> str | None:
    """Return the key by which a node names its kind; None for a node that is the same in JSON."""
    first = next(iter(node), None) if isinstance(node, dict) else None
    return first if first is not None and first.startswith("$") else None


text_of: Callable[[Json], str] = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
"""Text of a node, equal for equal nodes; made once, because `json.dumps` makes an encoder for each call."""


_SPECIAL = re.compile("[%/#\ud800-\udfff]")


def component(key: Json) -> str:
    """Return the path component of an (encoded) key; different strings give different components."""
    return _escaped(key if isinstance(key, str) else text_of(key))


@lru_cache(maxsize=10_000)  # the names of a state are the same at each save
def _escaped(text: str) -> str:
    if not text:
        return "%"
    return _SPECIAL.sub(
        lambda m: "".join(f"%{byte:02X}" for byte in m[0].encode("utf-8", "surrogatepass")), text
    )


@lru_cache(maxsize=10_000)
def part_of(key: str) -> str | None:
    """Return the path component of a string that can be a key in JSON as it is; None for another string."""
    return _escaped(key) if not key.startswith("$") and is_text(key) else None


def components(keys: Iterable[Json]) -> list[str]:
    """Return the path components of keys of mixed types, among which 0 and "0" must differ."""
    parts: dict[str, None] = {}
    for key in keys:
        part = component(key)
        while part in parts:
            part += "~"
        parts[part] = None
    return list(parts)


def inside(path: str) -> str:
    """Return the beginning of the paths of a container's items."""
    return f"{path}/" if path else ""


def is_text(value: str) -> bool:
    """Whether a string has no lone surrogates, and can be encoded."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
