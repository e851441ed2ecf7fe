"""The filter language: MongoDB's operators as JSON, and comparisons in words.

    {"config.optimizer.lr": {"$lt": 0.01}, "status": "finished"}
    valid_loss<0.3 status=finished

Both become one tree of conditions.  Over runs `matcher` decides in Python, the same for both databases; over
rows of metrics, of which there may be millions, `sql_condition` in SQL.  docs/guide/queries.md describes what
the operators mean.
"""

from __future__ import annotations

import contextlib
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from everstep.errors import ConfigError, nearest

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement

_ORDERS: dict[str, Callable[[Any, Any], Any]] = {
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}
COMPARISONS = ("$eq", "$ne", *_ORDERS, "$in", "$not", "$exists")
GROUPS = ("$and", "$or")
CONTAINS = "contains"
"""Operator of a bare word among comparisons: a part of a run's name."""

Row = TypeVar("Row", bound=Mapping[str, Any])


class Leaf(NamedTuple):
    """Condition on the values at a path: $eq, $gt, $gte, $lt, $lte, $in, $exists or `CONTAINS`."""

    path: str
    operator: str
    value: Any

    @property
    def values(self) -> list[Any]:
        """The values with which it compares."""
        return self.value if self.operator == "$in" else [self.value]

    @property
    def about_missing(self) -> bool:
        """Whether it may hold of a document without a value."""
        return self.operator == "$exists" or any(value is None for value in self.values)


class Not(NamedTuple):
    """Negation of a condition."""

    part: Node


class Group(NamedTuple):
    """Conjunction or disjunction of conditions."""

    every: bool
    parts: tuple[Node, ...]


Node: TypeAlias = Leaf | Not | Group
Values: TypeAlias = Callable[[str], Sequence[Any]]
"""Returns the values at a path of a document."""


def leaves(node: Node) -> Iterator[Leaf]:
    """Yield all conditions, in their order."""
    if isinstance(node, Leaf):
        yield node
    else:
        for part in [node.part] if isinstance(node, Not) else node.parts:
            yield from leaves(part)


# ---------------------------------------------------------------------------------- JSON


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
        raise ConfigError(
            f'the filter is not JSON ({error}); give an object, as in \'{{"step": {{"$gt": 100}}}}\''
        ) from None
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
        elif key in COMPARISONS:
            raise ConfigError(f"{key} belongs to a field; give its name first: {{'step': {{'{key}': ...}}}}")
        elif key not in GROUPS:
            raise ConfigError(f"no operator {key}; {nearest(key, (*GROUPS, *COMPARISONS))}")
        elif not isinstance(value, list | tuple) or not value:
            raise ConfigError(f"{key} takes a list of one or more filters; change {value!r}")
        else:
            parts.append(Group(key == "$and", tuple(map(_filter, value))))
    return Group(True, tuple(parts))


def _conditions(path: str, value: Any) -> Node:
    """Read the conditions on a field: a value to equal, or operators."""
    if isinstance(value, Mapping) and any(str(key).startswith("$") for key in value):
        return Group(True, tuple(_condition(path, key, item) for key, item in value.items()))
    if isinstance(value, Mapping) and value and all(f"${key}" in COMPARISONS for key in value):
        raise ConfigError(f"{path}: operators begin with $; change {value!r}, or ask for {{'$eq': ...}}")
    return Leaf(path, "$eq", _json(path, value))


def _condition(path: str, sign: str, value: Any) -> Node:
    if sign not in COMPARISONS:
        raise ConfigError(f"{path}: no operator {sign}; {nearest(str(sign), COMPARISONS)}")
    if sign == "$not":
        if not isinstance(value, Mapping) or not value or not all(str(key).startswith("$") for key in value):
            raise ConfigError(
                f"{path}: $not takes operators, as in {{'$not': {{'$gt': 1}}}}; change {value!r}"
            )
        return Not(_conditions(path, value))
    if sign == "$ne":
        return Not(Leaf(path, "$eq", _json(path, value)))
    if sign == "$in" and not isinstance(value, list | tuple):
        raise ConfigError(f"{path}: $in takes a list; change {value!r}")
    if sign == "$exists" and not isinstance(value, bool):
        raise ConfigError(f"{path}: $exists takes true or false; change {value!r}")
    if sign in _ORDERS and not isinstance(value, bool | int | float | str):
        raise ConfigError(f"{path}: {sign} compares numbers, strings, true and false; change {value!r}")
    return Leaf(path, sign, _json(path, value))


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


# ---------------------------------------------------------------------------------- words

_COMPARISON = re.compile(r"\s*([^\s<>=!]+)\s*(<=|>=|!=|==|=|<|>)\s*(\"[^\"]*\"|'[^']*'|[^\s,<>=!]+)")
_WORD = re.compile(r"\s*((?=[^\s,]*\w)[^\s,<>=!\"']+)(?![^\s,]|\s*[<>=!])")
"""A bare word, with a letter or digit: "&" is somebody's "and"; `_COMPARISON` is tried before it."""
_SEPARATOR = re.compile(r"\s*,\s*|\s+and\s+|\s*")
_SIGNS = {"<": "$lt", "<=": "$lte", ">": "$gt", ">=": "$gte"}


def parse_words(text: str) -> Group:
    """Read comparisons that must all hold, separated by blanks, commas or "and".

    A bare word means the runs whose name contains it.
    """
    parts: list[Node] = []
    at = 0
    while text[at:].strip(" ,"):
        if (match := _COMPARISON.match(text, at)) is not None:
            parts.append(_comparison(*match.groups()))
        elif (match := _WORD.match(text, at)) is not None:
            parts.append(Leaf("name", CONTAINS, match[1]))
        else:
            raise ConfigError(
                f"{text[at:].strip()!r} is not a comparison; give NAME<VALUE with one of "
                "< <= = != >= >, as in 'valid_loss<0.3 status=finished', or a part of a run's name"
            )
        separator = _SEPARATOR.match(text, match.end())
        at = len(text) if separator is None else separator.end()
    return Group(True, tuple(parts))


def _comparison(name: str, sign: str, text: str) -> Node:
    value: Any = text[1:-1] if text[0] in "\"'" else text
    if name != "name" and text[0] not in "\"'":
        with contextlib.suppress(ValueError):
            value = float(text)
    if sign in _SIGNS:
        return Leaf(name, _SIGNS[sign], value)
    truth = {"true": [True], "false": [False]}.get(value, []) if isinstance(value, str) else []
    equal = Leaf(name, "$in", [value, *truth])
    return Not(equal) if sign == "!=" else equal


def why_none(conditions: Group) -> str:
    """Say what conditions on names may have meant, for an empty answer; "" where that is clear."""
    for leaf in conditions.parts:
        if isinstance(leaf, Leaf) and leaf.path == "name" and leaf.operator == "$in":
            name = leaf.value[0]
            return f"name={name} asks for a whole name; {name} alone finds the names that contain it"
        if isinstance(leaf, Leaf) and leaf.operator == CONTAINS:
            return f"no name contains {leaf.value!r}; to ask for a value, compare it, as in status=failed"
    return ""


# -------------------------------------------------------------------------------- meaning


def matcher(node: Node) -> Callable[[Values], bool]:
    """Turn a filter into a function that says whether it holds of a document's values."""
    if isinstance(node, Not):
        part = matcher(node.part)
        return lambda values: not part(values)
    if isinstance(node, Group):
        parts, every = [matcher(part) for part in node.parts], node.every
        return lambda values: (all if every else any)(part(values) for part in parts)
    path = node.path
    if node.operator == "$exists":
        return lambda values: bool(values(path)) == node.value
    test, missing = _test(node), node.about_missing
    return lambda values: any(map(test, there)) if (there := values(path)) else missing


def _test(leaf: Leaf) -> Callable[[Any], bool]:
    wanted = leaf.value
    if leaf.operator == CONTAINS:
        return lambda value: isinstance(value, str) and wanted in value
    if leaf.operator in ("$eq", "$in"):
        keys = {_key(value) for value in leaf.values}
        return lambda value: _key(value) in keys
    kind, order = kind_of(wanted), _ORDERS[leaf.operator]
    return lambda value: kind_of(value) == kind and bool(order(value, wanted))


def kind_of(value: Any) -> str:
    """Return the kind of a JSON value: values of one kind are compared."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int | float):
        return "number"
    return "text" if isinstance(value, str) else "list" if isinstance(value, list) else "object"


def _key(value: Any) -> tuple[str, Any]:
    """Return what is equal for equal values: 1 equals 1.0, true is not 1, NaN equals itself."""
    kind = kind_of(value)
    if kind == "number" and value != value:
        return kind, "nan"
    if kind == "list":
        return kind, tuple(map(_key, value))
    if kind == "object":
        return kind, frozenset((name, _key(item)) for name, item in value.items())
    return kind, value


def values_at(tree: Mapping[str, Any], path: str) -> list[Any]:
    """List the values to which a path leads; a list is followed by its elements.

    A path is names joined by dots.  It goes through objects by name and through lists by number; an object in
    a list is reached without the number, too: `a.b` of {"a": [{"b": 1}, {"b": 2}]} is 1 and 2.
    """
    values: list[Any] = []
    for value in _below(tree, path):
        values += [value, *value] if isinstance(value, list) else [value]
    return values


def _below(value: Any, path: str) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            if isinstance(item, dict):
                yield from _below(item, path)
        value = {str(at): item for at, item in enumerate(value)}
    for key, item in value.items() if isinstance(value, dict) else ():
        if key == path:
            yield item
        elif path.startswith(f"{key}."):
            yield from _below(item, path[len(key) + 1 :])


def ordered(rows: Iterable[Row], name: str, descending: bool) -> list[Row]:
    """Sort by a value: numbers first, then strings; documents without the value come last in both orders."""
    have: list[Row] = []
    lack: list[Row] = []
    for row in rows:
        value = row.get(name)
        (lack if value is None or value != value else have).append(row)
    return sorted(have, key=lambda row: _sort_key(row[name]), reverse=descending) + lack


def _sort_key(value: Any) -> tuple[bool, Any]:
    return (False, value) if isinstance(value, int | float) else (True, str(value))


def sql_condition(node: Node, column: Callable[[str], tuple[ColumnElement[Any], str]]) -> ColumnElement[bool]:
    """Turn a filter over the rows of tables into an expression, which is never NULL, so that NOT negates it.

    Args:
        column: returns the column of a name, and its kind; NULL in a column of numbers is NaN.
    """
    from sqlalchemy import Float, and_, cast, false, literal, not_, or_, true

    if isinstance(node, Not):
        return not_(sql_condition(node.part, column))
    if isinstance(node, Group):
        parts = [sql_condition(part, column) for part in node.parts]
        return and_(true(), *parts) if node.every else or_(false(), *parts)
    source, kind = column(node.path)
    if node.operator == "$exists":
        return true() if node.value else false()
    if kind == "number":
        source = cast(source, Float)
    typed: dict[str, Callable[[Any], Any]] = {"number": as_number, "bool": int}
    wanted = [typed.get(kind, str)(value) for value in node.values if kind_of(value) == kind]
    there = [value for value in wanted if value == value]
    if node.operator in ("$eq", "$in"):
        nan = source.is_(None) if len(there) < len(wanted) else false()
        return or_(nan, and_(source.is_not(None), source.in_(there)))
    order = _ORDERS[node.operator]
    return or_(false(), *(and_(source.is_not(None), order(source, literal(value))) for value in there))


def as_number(value: int | float) -> float:
    """Convert a number to a float; one that is too large becomes infinite."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
