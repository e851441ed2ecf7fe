"""Mutations of files that know what is in them: of bytes, and of the JSON values in a text."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

Tree = Any

_RAW = "\x01raw %d\x01"
"""Stands in a tree for a text that `json.dumps` would not write."""

RAW = (
    "NaN",
    "-Infinity",
    "1e999",
    "-0.0",
    "9" * 400,
    "9" * 5000,
    "[" * 2_000 + "]" * 2_000,
    '{"a":' * 300 + "1" + "}" * 300,
    '{"a":1,"a":"two"}',
    '"\\ud800"',
    '"\\u0000"',
    "[" * 100_000,
    "tru",
)
"""Texts in the place of a value, some of them no JSON."""

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63) - 1, 10**30),
    *(0.5, -1.5, 1e11, 1e300, 5e-324),
    *("", " ", "\0", "\n", "\ud800", "²", "٣", "x" * 5_000, "NaN", "-1", "constructor", "__class__"),
    *("..", "../../x", "/etc/passwd", "file:///etc/passwd", "a/b", "os:system", "step-00000001"),
    *("0001-01-01T00:00:00", "9999-12-31T23:59:59+14:00", "yesterday", "%s%n{0}"),
    *([], {}, [[]], [{}], {"": None}, {"a": {"b": [1]}}, [None] * 300, list(range(300))),
)
"""Values in the place of another."""


def mutated(tree: Tree, rng: Random) -> bytes:
    """A JSON text with one to three changes: other values, missing, further and double names, no JSON."""
    changed = json.loads(json.dumps(tree))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        changed = _changed(changed, rng)
    text = json.dumps(changed, separators=(",", ":"), ensure_ascii=rng.random() < 0.9)
    for number, raw in enumerate(RAW):
        text = text.replace(json.dumps(_RAW % number), raw)
    return text.encode("utf-8", "surrogatepass")


def value_of(text: bytes) -> Tree:
    """The value of a mutated text as Python reads it, for readers that are given values; None for no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _changed(tree: Tree, rng: Random) -> Tree:
    places = list(_places(tree))
    if not places:
        return _odd(rng)
    node, key = rng.choice(places)
    how = rng.random()
    if how < 0.6:
        node[key] = _odd(rng)
    elif how < 0.7:
        del node[key]
    elif how < 0.8:  # the value of another place: right in its form, and wrong here
        other, at = rng.choice(places)
        node[key] = json.loads(json.dumps(other[at]))
    elif how < 0.9:
        node[key] = _near(node[key], rng)
    elif isinstance(node, dict):
        node[rng.choice((str(_odd(rng))[:50], key.upper(), key + "\u0301"))] = node[key]
    else:
        node.append(node[key])
    return tree


def _near(value: Any, rng: Random) -> Any:
    """A value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return rng.choice((value + 1, value - 1, -value, value * 2**40, float(value), str(value)))
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        return value[:at] + rng.choice(("", "0", "/", "\0", "\ud800", value)) + value[at + 1 :]
    if isinstance(value, list):
        return rng.choice((value[:-1], value * 2, value[::-1], dict.fromkeys(map(str, value))))
    return list(value) if isinstance(value, dict) else [value]


def _odd(rng: Random) -> Any:
    return _RAW % rng.randrange(len(RAW)) if rng.random() < 0.15 else json.loads(json.dumps(rng.choice(ODD)))


def _places(tree: Tree) -> Any:
    """(list or dictionary, index or key) of every value below the root."""
    level = [tree]
    while level:
        node = level.pop()
        if isinstance(node, dict | list):
            for key, value in node.items() if isinstance(node, dict) else enumerate(node):
                yield node, key
                level.append(value)


def harmed(raw: bytes, rng: Random) -> bytes:
    """Bytes with one to four changes: flips, cuts, zeros, repeats, giant lengths, noise."""
    found = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(found) + 1)
        length = rng.choice((1, 2, 4, 8, 40, 300))
        rng.choice(_HARMS)(found, at, length, rng)
    return bytes(found)


def _flip(found: bytearray, at: int, length: int, rng: Random) -> None:
    if at < len(found):
        found[at] ^= 1 << rng.randrange(8)


def _put(found: bytearray, at: int, length: int, rng: Random) -> None:
    found[at : at + rng.choice((0, length))] = rng.randbytes(length)


def _length(found: bytearray, at: int, length: int, rng: Random) -> None:
    """A giant or an odd number where a length may stand."""
    size = rng.choice((4, 8))
    number = rng.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1, len(found))) % (1 << 8 * size)
    found[at : at + size] = number.to_bytes(size, "little")


_HARMS: tuple[Callable[[bytearray, int, int, Random], object], ...] = (
    _flip,
    _flip,
    _put,
    _length,
    lambda found, at, length, rng: found.__delitem__(slice(at, None)),
    lambda found, at, length, rng: found.__delitem__(slice(at, at + length)),
    lambda found, at, length, rng: found.__setitem__(slice(at, at + length), bytes(length)),
    lambda found, at, length, rng: found.__setitem__(slice(at, at), found[at - length : at]),
)
