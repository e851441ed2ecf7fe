"""The filter language: MongoDB's operators as JSON, and comparisons in words.

    {"config.optimizer.lr": {"$lt": 0.01}, "status": "finished"}
    valid_loss<0.3 status=finished

Both become one tree of conditions, and `matcher` decides, in Python, the same for both databases.
docs/guide/queries.md describes what the operators mean.
"""

from __future__ import annotations

import contextlib
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from everstep.errors import ConfigError, nearest
from everstep.index import STATUSES

_ORDERS = {"$gt": operator.gt, "$gte": operator.ge, "$lt": operator.lt, "$lte": operator.le}
_TAKES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("$eq", "$ne"), (object, "")),
    **dict.fromkeys(_ORDERS, (bool | int | float | str, "a number, a string, true or false")),
    "$in": (list | tuple, "a list"),
    "$exists": (bool, "true or false"),
    "$not": (Mapping, "operators, as in {'$not': {'$gt': 1}}"),
}
"""Operator on a field -> types of what it takes, and these in words."""
GROUPS = ("$and", "$or")
CONTAINS = "contains"
"""Operator of a bare word among comparisons: a part of a run's name."""

Row = TypeVar("Row", bound=Mapping[str, Any])


class Leaf(NamedTuple):
    """Condition on the values at a path: $in (also for $eq), $gt, $gte, $lt, $lte, $exists or `CONTAINS`."""

    path: str
    operator: str
    value: Any


class Group(NamedTuple):
    """Conditions of which `all`, `any` or `none` must hold."""

    holds: Callable[[Iterable[bool]], bool]
    parts: tuple[Node, ...]


def none(values: Iterable[bool]) -> bool:
    return not any(values)


Node: TypeAlias = Leaf | Group
Values: TypeAlias = Callable[[str], Sequence[Any]]
"""Returns the values at a path of a document."""


def leaves(node: Node, required: bool = False) -> Iterator[Leaf]:
    """Yield all conditions in their order, or only those without which the whole does not hold."""
    if isinstance(node, Leaf):
        yield node
    elif not required or node.holds is all:
        for part in node.parts:
            yield from leaves(part, required)


def parse(where: Mapping[str, Any]) -> Node:
    """Read a filter; an unknown operator is an error that names the nearest."""
    try:
        return _filter(where)
    except RecursionError:
        raise ConfigError("the filter is nested too deep; give a flatter one") from None


def parse_json(text: str) -> Node:
    """Read a filter that a person wrote as JSON."""
    try:
        where = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f'the filter is not JSON ({error}); give {{"step": {{"$gt": 100}}}}, say') from None
    return parse(where)


def _filter(where: Any) -> Node:
    if not isinstance(where, Mapping):
        raise ConfigError(f"a filter is an object, as in {{'status': 'finished'}}; change {where!r}")
    parts: list[Node] = []
    for key, value in where.items():
        if not isinstance(key, str) or not key:
            raise ConfigError(f"the name of a field is a string that is not empty; change {key!r}")
        if not key.startswith("$"):
            parts.append(_conditions(key, value))
        elif key not in GROUPS:
            raise ConfigError(
                f"no operator {key} between filters; {nearest(key, GROUPS)}; those on a field stand inside it"
            )
        elif not isinstance(value, list | tuple) or not value:
            raise ConfigError(f"{key} takes a list of one or more filters; change {value!r}")
        else:
            parts.append(Group(all if key == "$and" else any, tuple(map(_filter, value))))
    return Group(all, tuple(parts))


def _conditions(path: str, value: Any) -> Node:
    """Read the conditions on a field: a value to equal, or operators."""
    if isinstance(value, Mapping) and any(str(key).startswith("$") for key in value):
        return Group(all, tuple(_condition(path, key, item) for key, item in value.items()))
    if isinstance(value, Mapping) and value and all(f"${key}" in _TAKES for key in value):
        raise ConfigError(f"{path}: operators begin with $; change {value!r}, or ask for {{'$eq': ...}}")
    return _condition(path, "$eq", value)


def _condition(path: str, sign: str, value: Any) -> Node:
    if sign not in _TAKES:
        raise ConfigError(f"{path}: no operator {sign}; {nearest(str(sign), _TAKES)}")
    types, noun = _TAKES[sign]
    fits = isinstance(value, types)
    if fits and sign == "$not":
        fits = bool(value) and all(str(key).startswith("$") for key in value)
    if not fits:
        raise ConfigError(f"{path}: {sign} takes {noun}; change {value!r}")
    if sign == "$not":
        return Group(none, (_conditions(path, value),))
    try:
        value = json.loads(json.dumps(value))
    except (TypeError, ValueError):
        raise ConfigError(f"{path}: {value!r} is not a JSON value; give numbers, strings, lists") from None
    leaf = Leaf(path, "$in", [value]) if sign in ("$eq", "$ne") else Leaf(path, sign, value)
    return Group(none, (leaf,)) if sign == "$ne" else leaf


_PART = re.compile(
    r"""\s*(?:
        (?P<name>[^\s<>=!]+)\s*(?P<sign><=|>=|!=|==|=|<|>)\s*(?P<value>"[^"]*"|'[^']*'|[^\s,<>=!]+)
        |(?P<word>(?=[^\s,]*\w)[^\s,<>=!"']+)(?![^\s,]|\s*[<>=!])
    )(?:\s*,\s*|\s+and\s+|\s*)""",
    re.VERBOSE,
)
"""A comparison, or a bare word with a letter or digit ("&" is somebody's "and"); and what separates it."""
_SIGNS = {"<": "$lt", "<=": "$lte", ">": "$gt", ">=": "$gte"}


def parse_words(text: str) -> Group:
    """Read comparisons that must all hold, separated by blanks, commas or "and".

    A bare word means the runs whose name contains it; a status alone also those that have it.
    """
    parts, at = list[Node](), 0
    while text[at:].strip(" ,"):
        match = _PART.match(text, at)
        if match is None:
            raise ConfigError(
                f"{text[at:].strip()!r} is not a comparison; give NAME<VALUE with one of "
                "< <= = != >= >, as in 'valid_loss<0.3 status=finished', or a part of a run's name"
            )
        word = match["word"]
        part = Leaf("name", CONTAINS, word) if word else _comparison(*match.group(1, 2, 3))
        parts.append(Group(any, (part, Leaf("status", "$in", [word]))) if word in STATUSES else part)
        at = match.end()
    return Group(all, tuple(parts))


def _comparison(name: str, sign: str, text: str) -> Node:
    value: Any = text[1:-1] if text[0] in "\"'" else text
    if name != "name":
        with contextlib.suppress(ValueError):
            value = float(text)  # not of a number in quotes
    if sign in _SIGNS:
        return Leaf(name, _SIGNS[sign], value)
    equal = Leaf(name, "$in", [value, value == "true"] if value in ("true", "false") else [value])
    return Group(none, (equal,)) if sign == "!=" else equal


def matcher(node: Node) -> Callable[[Values], bool]:
    """Turn a filter into a function that says whether it holds of a document's values."""
    if isinstance(node, Group):
        holds, parts = node.holds, [matcher(part) for part in node.parts]
        return lambda values: holds(part(values) for part in parts)
    path, operand = node.path, node.value
    if node.operator == "$exists":
        return lambda values: bool(values(path)) == operand
    if node.operator == CONTAINS:
        return lambda values: any(isinstance(value, str) and operand in value for value in values(path))
    if node.operator == "$in":
        keys = set(map(_key, operand))
        # null holds of a document without a value, too
        return lambda values: any(_key(value) in keys for value in values(path) or [None])
    kind, order = _kind_of(operand), _ORDERS[node.operator]
    return lambda values: any(_kind_of(each) == kind and order(each, operand) for each in values(path))


def _kind_of(value: Any) -> type:
    """Return the kind of a JSON value: values of one kind are compared."""
    return float if isinstance(value, int) and not isinstance(value, bool) else type(value)


def _key(value: Any) -> tuple[Any, Any]:
    """Return what is equal for equal values: 1 equals 1.0, true is not 1, NaN equals itself."""
    if isinstance(value, list):
        return list, tuple(map(_key, value))
    if isinstance(value, dict):
        return dict, frozenset((name, _key(item)) for name, item in value.items())
    return _kind_of(value), value if value == value else "nan"


def values_at(tree: Any, path: str) -> list[Any]:
    """List the values to which a path leads; a list is followed by its elements.

    A path is names joined by dots.  It goes through objects by name and through lists by number; an object in
    a list is reached without the number, too: `a.b` of {"a": [{"b": 1}, {"b": 2}]} is 1 and 2.
    """
    values: list[Any] = []
    if isinstance(tree, list):
        values += [value for item in tree if isinstance(item, dict) for value in values_at(item, path)]
        tree = {str(at): item for at, item in enumerate(tree)}
    for key, item in tree.items() if isinstance(tree, dict) else ():
        if key == path:
            values += [item, *item] if isinstance(item, list) else [item]
        elif path.startswith(f"{key}."):
            values += values_at(item, path[len(key) + 1 :])
    return values


def ordered(rows: Iterable[Row], name: str, descending: bool) -> list[Row]:
    """Sort by a value: numbers first, then strings; documents without the value come last in both orders."""

    def key(row: Row) -> tuple[bool, bool, Any]:
        value = row.get(name)
        if value is None or value != value:
            return not descending, False, 0
        is_number = isinstance(value, int | float)
        return descending, not is_number, value if is_number else str(value)

    return sorted(rows, key=key, reverse=descending)
