"""A tree of JSON values as rows that can be asked by path, with the semantics of MongoDB's paths.

A path is names joined by dots.  It goes through objects by name and through lists by number; and, where
an object lies in a list, also without the number: `a.b` of {"a": [{"b": 1}, {"b": 2}]} is 1 and 2.

There is one row per value, as so many paths lead to one inside lists in lists.  The row has the path with all
numbers, each after `ELEMENT` instead of a dot; which paths lead there `leads` says.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

LONGEST_LIST = 1000
"""Of a list, so many elements can be asked for."""

LONGEST_NAME = 250
"""So many characters of a metric's name are in the index; of a longer one a hash, too."""

DEEPEST = 64
"""So many levels of objects and lists can be asked for."""

ELEMENT = "\x1f"
"""In a path of the table, what comes before the number of a list's element."""

_PARTS = re.compile(f"([.{ELEMENT}])([^.{ELEMENT}]*)")


class Field(NamedTuple):
    """Value and its place, as the table `fields` has it from `path` on."""

    path: str
    kind: str
    number: float | None
    text: str | None


def fields_of(tree: dict[str, Any]) -> Iterator[Field]:
    """Every value in a tree, with its place."""
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
    """Whether a path that is asked for leads to a place, or to the list whose element lies there."""
    names = path.split(".")
    parts = _PARTS.findall(f".{place}")
    reached = {0}  # how many of the names may have been used
    for (sign, name), (after, _) in zip(parts, [*parts[1:], (".", "")], strict=True):
        used = {at + 1 for at in reached if at < len(names) and names[at] == name}
        reached = used | reached if sign == ELEMENT and after == "." else used
    return len(names) in reached


def values_at(tree: dict[str, Any], path: str) -> list[Any]:
    """The values to which a path that is asked for leads; of a list its elements, too."""
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
    """A key, or a path that is asked for, as it is in the table."""
    return clean(text).replace(ELEMENT, "\N{REPLACEMENT CHARACTER}")


def typed(value: Any) -> tuple[str, float | None, str | None]:
    """(kind, number, text) of a JSON value, as the table has them."""
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
    """An int or float as a float; beyond the floats it is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def clean(text: str) -> str:
    """Text without what a database refuses: half of a character, and NUL."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def short(name: str) -> str:
    """The name of a metric or phase as the index has it: a database limits how long a key is."""
    name = clean(name)
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}...{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def canonical(value: Any) -> str:
    """JSON that is equal for equal values: keys sorted, numbers as floats."""
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
    """The rows of the table `fields` for what a run's newest start recorded."""
    return [(run, at, *field) for at, field in enumerate(fields_of(tree))]
