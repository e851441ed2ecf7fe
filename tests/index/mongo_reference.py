"""MongoDB's filter language over dictionaries in plain Python: what both databases must answer."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from typing import Any

Document = dict[str, Any]


def answer(
    documents: list[Document], where: Any, sort: list[str], limit: int | None, flat: Collection[str] = ()
) -> list[Document]:
    """The documents for which a filter holds, sorted, the first so many; `flat` are names with no path."""
    found = [document for document in documents if holds(document, where, flat)]
    for name in reversed(sort):
        found = ordered(found, name.removeprefix("-"), name.startswith("-"), flat)
    return found[:limit]


def holds(document: Document, where: Any, flat: Collection[str] = ()) -> bool:
    results = []
    for key, value in where.items():
        if key == "$and":
            results.append(all(holds(document, part, flat) for part in value))
        elif key == "$or":
            results.append(any(holds(document, part, flat) for part in value))
        else:
            results.append(meets(values_at(document, key, flat), value))
    return all(results)


def values_at(document: Any, path: str, flat: Collection[str] = ()) -> list[Any]:
    """The values at the end of a path."""
    if path in flat:
        return [document[path]] if path in document else []
    found = []
    for key, value in document.items():
        key = clean(key)
        if path == key:
            found.append(value)
        elif path.startswith(key + "."):
            found += inside(value, path[len(key) + 1 :])
    return found


def inside(value: Any, path: str) -> list[Any]:
    if isinstance(value, dict):
        return values_at(value, path)
    if not isinstance(value, list):
        return []
    first, _, rest = path.partition(".")
    found = []
    for at, item in enumerate(value):
        if first == str(at):
            found += inside(item, rest) if rest else [item]
        if isinstance(item, dict):
            found += values_at(item, path)
    return found


def meets(values: list[Any], condition: Any) -> bool:
    if not (isinstance(condition, dict) and any(key.startswith("$") for key in condition)):
        condition = {"$eq": condition}
    return all(operate(values, operator, other) for operator, other in condition.items())


def operate(values: list[Any], operator: str, other: Any) -> bool:
    if operator == "$not":
        return not meets(values, other)
    if operator in ("$ne", "$nin"):
        return not operate(values, {"$ne": "$eq", "$nin": "$in"}[operator], other)
    if operator == "$in":
        return any(operate(values, "$eq", one) for one in other)
    if operator == "$exists":
        return bool(values) == other
    if other is None:
        return operator in ("$eq", "$gte", "$lte") and (
            not values or any(one is None for one in spread(values))
        )
    return any(compare(one, operator, other) for one in spread(values))


def spread(values: list[Any]) -> list[Any]:
    """Values, and the elements of those that are lists."""
    return values + [item for value in values if isinstance(value, list) for item in value]


def compare(one: Any, operator: str, other: Any) -> bool:
    if operator == "$regex":
        return isinstance(one, str) and re.search(other, clean(one)) is not None
    if kind(one) != kind(other):
        return False
    if kind(one) in ("list", "object"):
        return canonical(one) == canonical(other)
    if kind(one) == "text":
        one, other = clean(one), clean(other)
    else:
        one, other = number(one), number(other)
        if math.isnan(one) or math.isnan(other):
            return math.isnan(one) and math.isnan(other) and operator in ("$eq", "$gte", "$lte")
    order = (one > other) - (one < other)
    return {"$eq": order == 0, "$gt": order > 0, "$gte": order >= 0, "$lt": order < 0, "$lte": order <= 0}[
        operator
    ]


def kind(value: Any) -> str:
    if value is None:
        return "null"
    for name, type_ in (("bool", bool), ("number", int | float), ("text", str), ("list", list)):
        if isinstance(value, type_):
            return name
    return "object"


def canonical(value: Any) -> Any:
    """What is equal for equal values, told apart from what is not."""
    if isinstance(value, dict):
        return sorted((clean(key), canonical(item)) for key, item in value.items())
    if isinstance(value, list):
        return ["list", *map(canonical, value)]
    if kind(value) == "number":
        return "nan" if number(value) != number(value) else number(value)
    return (kind(value), clean(value) if isinstance(value, str) else value)


def number(value: float) -> float:
    """As a float; what is larger is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def ordered(documents: list[Document], name: str, descending: bool, flat: Collection[str]) -> list[Document]:
    """Numbers (true is 1), then texts, then those without a value; lists and objects as their JSON.

    Where a path leads to several values the first one counts.
    """

    def value(document: Document) -> Any:
        if name in flat:
            return document.get(name)
        found, *_ = [*values_at(document, name), None]
        return json.dumps(found) if isinstance(found, dict | list) else found

    have = [one for one in documents if value(one) is not None and value(one) == value(one)]
    lack = [one for one in documents if value(one) is None or value(one) != value(one)]
    return sorted(have, key=lambda one: (isinstance(value(one), str), value(one)), reverse=descending) + lack
