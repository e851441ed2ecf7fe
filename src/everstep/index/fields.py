"""A tree of JSON values as rows that can be asked by path, with the semantics of MongoDB's paths.

A path is names joined by dots.  It goes through objects by name and through lists by number; and, where
an object lies in a list, also without the number: `a.b` of {"a": [{"b": 1}, {"b": 2}]} is 1 and 2.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

LONGEST_LIST = 1000
"""Of a list, so many elements can be asked for."""


class Field(NamedTuple):
    """One value at a path, or an element of the list there, as the table `fields` has it from `path` on."""

    path: str
    kind: str
    number: float | None
    text: str | None


def fields_of(tree: dict[str, Any]) -> Iterator[Field]:
    """Every value in a tree, at every path that leads to it."""
    for key, value in tree.items():
        for path, found in _walk(clean(str(key)), value):
            yield Field(path, *typed(found))


def values_at(tree: dict[str, Any], path: str) -> list[Any]:
    """The values to which a path leads, in the order of `fields_of`; of a list its elements, too."""
    path = clean(path)
    tops = ((clean(str(key)), value) for key, value in tree.items())
    below = [_walk(key, value) for key, value in tops if f"{path}.".startswith(f"{key}.")]
    return [value for walk in below for at, value in walk if at == path]


def _walk(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    yield path, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(f"{path}.{clean(str(key))}", item)
    elif isinstance(value, list):
        for at, item in enumerate(value[:LONGEST_LIST]):
            yield path, item
            yield from _walk(f"{path}.{at}", item)
            if isinstance(item, dict):
                for key, inner in item.items():
                    yield from _walk(f"{path}.{clean(str(key))}", inner)


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
