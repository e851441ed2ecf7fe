"""Simple comparisons over runs: "valid_loss<0.3 status=finished"."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from everstep.errors import ConfigError
from everstep.index import mongo
from everstep.index.mongo import Leaf

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
    "~": lambda found, part: part in found,
}
_CONDITION = re.compile(r"\s*([^\s<>=!]+)\s*(<=|>=|!=|==|=|<|>)\s*(\"[^\"]*\"|'[^']*'|[^\s,<>=!]+)")

_MOST_DIGITS = 1000
"""Most digits of an integer in a filter."""


_WORD = re.compile(r"\s*((?=[^\s,]*\w)[^\s,<>=!\"']+)(?![^\s,]|\s*[<>=!])")
"""A bare word, with a letter or digit: "&" is somebody's "and"; `_CONDITION` is tried before it."""

_LIKE = {"~": "$regex", "=": "$eq", "!=": "$eq", "<": "$lt", "<=": "$lte", ">": "$gt", ">=": "$gte"}


class Comparison(NamedTuple):
    """Comparison of `name` with `value`, a number or a string; "~" asks for a part of a string."""

    name: str
    operator: str
    value: float | str

    @property
    def leaf(self) -> Leaf:
        """The comparison as a part of a filter; for "!=" the condition that must not hold."""
        return Leaf(self.name, _LIKE[self.operator], self.value)

    def holds(self, found: Any) -> bool:
        """Whether the comparison holds for a value; for a missing value or another type only "!=" does."""
        if isinstance(found, bool):
            found = str(found).lower()
        if found is None or isinstance(found, str) != isinstance(self.value, str):
            return self.operator == "!="
        return _OPERATORS[self.operator](found, self.value)


def parse(text: str) -> list[Comparison]:
    """Parse conditions that must all hold, separated by blanks, commas or "and".

    A bare word means the runs whose name contains it.

    Raises:
        ConfigError: a part is neither a comparison nor a word.
    """
    conditions, at = [], 0
    while text[at:].strip(" ,"):
        match = _CONDITION.match(text, at)
        if match is not None:
            name, sign, value = match.groups()
            conditions.append(Comparison(name, "=" if sign == "==" else sign, _value(name, value)))
        elif (match := _WORD.match(text, at)) is not None:
            conditions.append(Comparison("name", "~", match[1]))
        else:
            raise ConfigError(
                f"{text[at:].strip()!r} is not a comparison; give NAME<VALUE with one of "
                "< <= = != >= >, as in 'valid_loss<0.3 status=finished', or a part of a run's name"
            )
        separator = re.compile(r"\s*,\s*|\s+and\s+|\s*").match(text, match.end())
        at = len(text) if separator is None else separator.end()
    return conditions


def why_none(conditions: Iterable[Comparison]) -> str:
    """Say what conditions on names may have meant, for an empty answer; "" where that is clear."""
    for name, sign, value in conditions:
        if name == "name" and sign == "=":
            return f"name={value} asks for a whole name; {value} alone finds the names that contain it"
        if sign == "~":
            return f"no name contains {value!r}; to ask for a value, compare it, as in status=failed"
    return ""


def _value(name: str, text: str) -> float | str:
    if text[0] in "\"'":
        return text[1:-1]
    if name == "name":
        return text
    try:
        return float(text)
    except ValueError:
        return text


def parse_json_filter(text: str) -> mongo.Node:
    """Parse a filter in MongoDB's language, as a person writes it.

    Raises:
        ConfigError: the string is not JSON, gives a key twice, or is not a filter.
    """
    try:
        found = json.loads(text, object_pairs_hook=_object, parse_int=_integer)
        return mongo.parse(found)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(
            f'the filter is not JSON ({error}); give an object, as in \'{{"step": {{"$gt": 100}}}}\''
        ) from None


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ConfigError(f"a number in the filter has {len(digits):,} digits; give {_MOST_DIGITS} at most")
    return int(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(
                f"the filter gives {key!r} twice in one object; put its conditions together, as in "
                '{"step": {"$gt": 100, "$lt": 200}}, or use $and'
            )
        found[key] = value
    return found


def where(
    found: Iterable[Mapping[str, Any]],
    conditions: Iterable[Comparison],
    several: Mapping[str, Mapping[int, list[Any]]] = MappingProxyType({}),
) -> list[Mapping[str, Any]]:
    """Select the runs that meet every condition.

    "name=digits" means `is_named`.

    Args:
        several: name -> a run's id -> its values, for names with several values: one of them is enough; for
            "!=" none may be equal.

    Raises:
        ConfigError: numbers would be compared with a string.
    """
    found = list(found)
    tests = [_test(condition, found, several.get(condition.name)) for condition in conditions]
    return [one for one in found if all(test(one) for test in tests)]


def _test(
    condition: Comparison, found: list[Mapping[str, Any]], several: Mapping[int, list[Any]] | None
) -> Callable[[Mapping[str, Any]], bool]:
    """Turn a condition into a function; `found` is the list of all values that it will be called with."""
    name, sign, value = condition
    if name == "name" and sign in ("=", "!="):
        return lambda one: is_named(one[name], str(value)) == (sign == "=")

    def values(one: Mapping[str, Any]) -> list[Any]:
        return [one.get(name)] if several is None else several.get(one["id"], [None])

    there = [value for one in found for value in values(one) if value is not None]
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in there)
    if isinstance(value, str) and there and numbers:
        raise ConfigError(
            f"{name}{sign}{value}: {name} is a number; compare it with a number, as in '{name}<0.3'"
        )
    enough = all if sign == "!=" else any
    return lambda one: enough(map(condition.holds, values(one)))


def is_named(name: str, text: str) -> bool:
    """Whether a run has a name, with or without the six digits at its end; beginnings do not count."""
    return text in (name, re.sub("-[0-9a-f]{6}$", "", name))


def ordered(found: Iterable[Mapping[str, Any]], name: str, descending: bool) -> list[Mapping[str, Any]]:
    """Sort by a value: numbers first, then strings; documents without the value come last in both orders."""
    have = [one for one in found if _sortable(one.get(name))]
    lack = [one for one in found if not _sortable(one.get(name))]
    return sorted(have, key=lambda one: (isinstance(one[name], str), one[name]), reverse=descending) + lack


def _sortable(value: Any) -> bool:
    return value is not None and value == value
