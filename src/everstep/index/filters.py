"""Simple comparisons over runs: "valid_loss<0.3 status=finished"."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from everstep.errors import ConfigError

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_CONDITION = re.compile(r"\s*([^\s<>=!]+)\s*(<=|>=|!=|==|=|<|>)\s*(\"[^\"]*\"|'[^']*'|[^\s,<>=!]+)")


class Condition(NamedTuple):
    """`name` compared with `value`, a number or a text."""

    name: str
    operator: str
    value: float | str

    def holds(self, found: Any) -> bool:
        """Whether it is true of the value `found`; of no value, and of another type, only "!=" is."""
        if isinstance(found, bool):
            found = str(found).lower()
        if found is None or isinstance(found, str) != isinstance(self.value, str):
            return self.operator == "!="
        return _OPERATORS[self.operator](found, self.value)


def parse(text: str) -> list[Condition]:
    """The conditions in a text, all of which must hold, separated by blanks, commas or "and".

    Raises:
        ConfigError: a part is no comparison.
    """
    conditions, at = [], 0
    while text[at:].strip(" ,"):
        match = _CONDITION.match(text, at)
        if match is None:
            raise ConfigError(
                f"{text[at:].strip()!r} is no comparison; give NAME<VALUE with one of "
                "< <= = != >= >, as in 'valid_loss<0.3 status=finished'"
            )
        name, sign, value = match.groups()
        conditions.append(Condition(name, "=" if sign == "==" else sign, _value(value)))
        separator = re.compile(r"\s*,\s*|\s+and\s+|\s*").match(text, match.end())
        at = len(text) if separator is None else separator.end()
    return conditions


def _value(text: str) -> float | str:
    if text[0] in "\"'":
        return text[1:-1]
    try:
        return float(text)
    except ValueError:
        return text


def where(found: Iterable[Mapping[str, Any]], conditions: Iterable[Condition]) -> list[Mapping[str, Any]]:
    """Those of which every condition holds."""
    conditions = list(conditions)
    return [one for one in found if all(c.holds(one.get(c.name)) for c in conditions)]


def ordered(found: Iterable[Mapping[str, Any]], name: str, descending: bool) -> list[Mapping[str, Any]]:
    """Sorted by a value: numbers first, then texts; those without it last, either way."""
    have = [one for one in found if _sortable(one.get(name))]
    lack = [one for one in found if not _sortable(one.get(name))]
    return sorted(have, key=lambda one: (isinstance(one[name], str), one[name]), reverse=descending) + lack


def _sortable(value: Any) -> bool:
    return value is not None and value == value
