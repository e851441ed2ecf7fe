"""MongoDB's filter language, read and checked: {"config.optimizer.lr": {"$lt": 0.01}, "status": "finished"}.

Its meaning is described in docs/guide/queries.md, and implemented in `everstep.index.translate`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from everstep.errors import ConfigError, nearest

COMPARISONS = ("$eq", "$ne", "$gt", "$gte", "$lt", "$lte", "$in", "$nin", "$not", "$exists", "$regex")
GROUPS = ("$and", "$or")

MOST_CONDITIONS = 200
"""Most conditions of a filter: databases limit the depth of an expression."""

MOST_VALUES = 10_000
"""Most values in all $in and $nin of a filter: databases limit the number of values in a query."""

MOST_LEVELS = 150
"""Most levels of lists and objects in a filter, those of its values included."""


class Leaf(NamedTuple):
    """Condition on the values at a path: $eq, $gt, $gte, $lt, $lte, $in, $exists or $regex."""

    path: str
    operator: str
    value: Any


class Not(NamedTuple):
    """Negation of a condition."""

    part: Node


class Group(NamedTuple):
    """Conjunction or disjunction of conditions."""

    every: bool
    parts: tuple[Node, ...]


Node: TypeAlias = Leaf | Not | Group


def parse(where: Mapping[str, Any]) -> Node:
    """Read a filter.

    Raises:
        ConfigError: the value is not a filter; an unknown operator is named with the nearest.
    """
    _require_bounded(where)
    node = _filter(where, 0)
    if len(paths(node)) > MOST_CONDITIONS:
        raise ConfigError(f"the filter has more than {MOST_CONDITIONS} conditions; give fewer, or use $in")
    values = sum(len(leaf.value) for leaf in leaves(node) if leaf.operator == "$in")
    if values > MOST_VALUES:
        raise ConfigError(
            f"$in and $nin of a filter take at most {MOST_VALUES} values in all; give fewer than {values}"
        )
    return node


def paths(node: Node) -> list[str]:
    """List the paths of all conditions, in their order."""
    return [leaf.path for leaf in leaves(node)]


def leaves(node: Node) -> Iterator[Leaf]:
    """Yield all conditions, in their order."""
    if isinstance(node, Leaf):
        yield node
    elif isinstance(node, Not):
        yield from leaves(node.part)
    else:
        for part in node.parts:
            yield from leaves(part)


def _filter(where: Any, depth: int) -> Node:
    if not isinstance(where, Mapping):
        raise ConfigError(f"a filter is an object, as in {{'status': 'finished'}}; change {where!r}")
    _require_shallow(depth)
    parts: list[Node] = []
    for key, value in where.items():
        if not isinstance(key, str) or not key:
            raise ConfigError(f"the name of a field is a string that is not empty; change {key!r}")
        if not key.startswith("$"):
            parts.append(_conditions(key, value, depth + 1))
        elif key in GROUPS:
            parts.append(_group(key, value, depth + 1))
        elif key in COMPARISONS:
            raise ConfigError(f"{key} belongs to a field; give its name first: {{'step': {{'{key}': ...}}}}")
        else:
            raise ConfigError(f"no operator {key}; {nearest(key, (*GROUPS, *COMPARISONS))}")
    return Group(True, tuple(parts))


def _group(key: str, value: Any, depth: int) -> Group:
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError(f"{key} takes a list of one or more filters; change {value!r}")
    return Group(key == "$and", tuple(_filter(part, depth) for part in value))


def _conditions(path: str, value: Any, depth: int) -> Node:
    """Read the conditions on a field: a value to equal, or operators."""
    _require_shallow(depth)
    if not (isinstance(value, Mapping) and any(str(key).startswith("$") for key in value)):
        _require_signs(path, value)
        return Leaf(path, "$eq", _json(path, value))
    return Group(True, tuple(_condition(path, key, item, depth) for key, item in value.items()))


def _require_signs(path: str, value: Any) -> None:
    """Refuse an object whose keys are operators without their $."""
    if isinstance(value, Mapping) and value and all(f"${key}" in COMPARISONS for key in value):
        signed = {f"${key}": item for key, item in value.items()}
        raise ConfigError(
            f"{path}: operators begin with $; give {signed!r}, or {{'$eq': {value!r}}} for the object itself"
        )


def _condition(path: str, operator: str, value: Any, depth: int) -> Node:
    if operator not in COMPARISONS:
        raise ConfigError(f"{path}: no operator {operator}; {nearest(operator, COMPARISONS)}")
    if operator == "$not":
        if not isinstance(value, Mapping) or not value or not all(str(key).startswith("$") for key in value):
            raise ConfigError(
                f"{path}: $not takes operators, as in {{'$not': {{'$gt': 1}}}}; change {value!r}"
            )
        part = _conditions(path, value, depth + 1)
        while isinstance(part, Group) and len(part.parts) == 1:
            (part,) = part.parts
        return part.part if isinstance(part, Not) else Not(part)  # SQLite reads few levels
    if operator == "$ne":
        return Not(Leaf(path, "$eq", _json(path, value)))
    if operator == "$nin":
        return Not(Leaf(path, "$in", _values(path, operator, value)))
    return Leaf(path, operator, _checked(path, operator, value))


def _checked(path: str, operator: str, value: Any) -> Any:
    if operator == "$in":
        return _values(path, operator, value)
    if operator == "$exists" and not isinstance(value, bool):
        raise ConfigError(f"{path}: $exists takes true or false; change {value!r}")
    if operator == "$regex":
        return _pattern(path, value)
    if operator != "$eq" and isinstance(value, list | tuple | Mapping):
        raise ConfigError(f"{path}: {operator} compares numbers, strings, true and false; change {value!r}")
    return _json(path, value)


def _values(path: str, operator: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{path}: {operator} takes a list; change {value!r}")
    return [_json(path, item) for item in value]


def _pattern(path: str, value: Any) -> str:
    try:
        with warnings.catch_warnings(action="ignore"):
            re.compile(value)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise ConfigError(
            f"{path}: {value!r} is not a regular expression of Python ({error}); change it"
        ) from error
    if not isinstance(value, str):
        raise ConfigError(f"{path}: $regex takes a string; change {value!r}")
    return value


def _json(path: str, value: Any) -> Any:
    """Convert a value to JSON's types: lists, and dictionaries with string keys."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_json(path, item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _json(path, item) for key, item in value.items()}
    raise ConfigError(
        f"{path}: {value!r} is not a JSON value; give null, true, false, numbers, strings, lists or objects"
    )


def _require_shallow(depth: int) -> None:
    if depth > 50:
        raise ConfigError("the filter is nested more than 50 deep; give a flatter filter")


def _require_bounded(where: Any) -> None:
    level = [where]
    for _ in range(MOST_LEVELS + 1):
        groups = [list(one.values()) if isinstance(one, Mapping) else one for one in level]
        level = [item for group in groups if isinstance(group, list | tuple) for item in group]
    if level:
        raise ConfigError(f"the filter is nested more than {MOST_LEVELS} deep; ask for a part of the value")
