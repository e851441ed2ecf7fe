"""Rows for a tree of JSON values, which queries find by path, with the semantics of MongoDB's paths.

A path is names joined by dots.  It goes through objects by name and through lists by number; an object in
a list is reached without the number, too: `a.b` of {"a": [{"b": 1}, {"b": 2}]} is 1 and 2.

There is one row per value, and not one per path, because many paths lead to a value inside lists in lists.
The row has the path with all numbers, each after `ELEMENT` instead of a dot; `leads` decides which paths
lead there.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

LONGEST_LIST = 1000
"""Most elements of a list that can be searched."""

LONGEST_NAME = 250
"""Most characters of a metric's name in the index; a longer name is cut, and gets a hash."""

DEEPEST = 64
"""Most levels of objects and lists that can be searched."""

ELEMENT = "\x1f"
"""Character before the number of a list's element in a path of the table."""

_PARTS = re.compile(f"([.{ELEMENT}])([^.{ELEMENT}]*)")


class Field(NamedTuple):
    """Value and its place: the columns of the table `fields`, from `path` on."""

    path: str
    kind: str
    number: float | None
    text: str | None


def fields_of(tree: dict[str, Any]) -> Iterator[Field]:
    """Yield every value in a tree, with its place."""
    for key, value in tree.items():
        yield from _walk(named(str(key)), value)


def _walk(path: str, value: Any, depth: int = 1) -> Iterator[Field]:
    yield Field(path, *typed(value))
    if depth == DEEPEST:
        return
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(f"{path}.{named(str(key))}", item, depth + 1)
    elif isinstance(value, list):
        for at, item in enumerate(value[:LONGEST_LIST]):
            yield from _walk(f"{path}{ELEMENT}{at}", item, depth + 1)


def leads(path: str, place: str) -> bool:
    """Whether a requested path leads to a place, or to the list that has the place as an element."""
    names = path.split(".")
    parts = _PARTS.findall(f".{place}")
    reached = {0}  # how many of the names may have been used
    for (sign, name), (after, _) in zip(parts, [*parts[1:], (".", "")], strict=True):
        used = {at + 1 for at in reached if at < len(names) and names[at] == name}
        reached = used | reached if sign == ELEMENT and after == "." else used
    return len(names) in reached


def values_at(tree: dict[str, Any], path: str) -> list[Any]:
    """List the values to which a path leads; a list is followed by its elements."""
    found: list[Any] = []
    for value in _below(tree, named(path)):
        found += [value, *value[:LONGEST_LIST]] if isinstance(value, list) else [value]
    return found


def _below(value: Any, path: str) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _into(item, path, named(str(key)))
    elif isinstance(value, list):
        for at, item in enumerate(value[:LONGEST_LIST]):
            yield from _into(item, path, str(at))
            if isinstance(item, dict):
                yield from _below(item, path)


def _into(item: Any, path: str, name: str) -> Iterator[Any]:
    if path == name:
        yield item
    elif path.startswith(f"{name}."):
        yield from _below(item, path[len(name) + 1 :])


def named(text: str) -> str:
    """Write a key, or a requested path, as the table has it."""
    return clean(text).replace(ELEMENT, "\N{REPLACEMENT CHARACTER}")


def typed(value: Any) -> tuple[str, float | None, str | None]:
    """Return (kind, number, text) of a JSON value, as the table has them."""
    if value is None:
        return "null", None, None
    if isinstance(value, bool):
        return "bool", float(value), None
    if isinstance(value, int | float):
        number = as_number(value)
        return "number", None if math.isnan(number) else number, None
    if isinstance(value, str):
        return "text", None, clean(value)
    return "list" if isinstance(value, list) else "object", None, canonical(value)


def as_number(value: int | float) -> float:
    """Convert an int or float to a float; a larger int becomes infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def clean(text: str) -> str:
    """Replace the characters that a database refuses: lone surrogates, and NUL."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def short(name: str) -> str:
    """Shorten the name of a metric or phase: databases limit the length of a key."""
    name = clean(name)
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}...{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def canonical(value: Any) -> str:
    """Write JSON that is equal for equal values: keys sorted, numbers as floats."""
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {clean(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, bool) or value is None:
        return value
    return as_number(value) + 0.0  # -0.0 is 0.0


def rows_of(run: int, tree: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Make the rows of the table `fields` for the record of a run's newest start."""
    return [(run, at, *field) for at, field in enumerate(fields_of(tree))]
