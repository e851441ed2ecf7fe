"""Translation of a filter to SQL, the same for both databases.

Each condition asks whether a document has a value at a path for which a test holds.  It is true or false
and never NULL, so that NOT negates it.  Every value, and every path, is a bound parameter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol, TypeAlias

from sqlalchemy import (
    ColumnElement,
    Connection,
    Float,
    Integer,
    Select,
    Text,
    and_,
    cast,
    false,
    func,
    literal,
    not_,
    or_,
    select,
    true,
)

from everstep.index.fields import as_number, canonical, clean, typed
from everstep.index.mongo import Group, Leaf, Node, Not
from everstep.index.regex import matching

Truth: TypeAlias = ColumnElement[bool]


class Value(NamedTuple):
    """Value in SQL: its possible kinds, each with its test; see `fields.typed`."""

    kinds: dict[str, Truth]
    number: ColumnElement[Any]
    text: ColumnElement[Any]

    def of(self, kind: str) -> Truth:
        """Whether the value is of a kind."""
        return self.kinds.get(kind, false())


class Values(Protocol):
    """Values at a path of the documents of a query."""

    def any(self, test: Callable[[Value], Truth]) -> Truth:
        """Whether a document has a value for which a test holds."""

    def exist(self) -> Truth:
        """Whether a document has a value."""

    def texts(self) -> Select[Any]:
        """Select all strings among the values of all documents, and maybe more."""


class ColumnValues(NamedTuple):
    """Values in a column: each document has one."""

    value: Value
    vocabulary: Select[Any]

    def any(self, test: Callable[[Value], Truth]) -> Truth:
        return test(self.value)

    def exist(self) -> Truth:
        return true()

    def texts(self) -> Select[Any]:
        return self.vocabulary.where(self.value.of("text"))


class SelectedValues(NamedTuple):
    """Values in rows of another table, which have the keys of their documents."""

    document: ColumnElement[Any]
    value: Value
    rows: Select[Any]  # of keys of documents

    def any(self, test: Callable[[Value], Truth]) -> Truth:
        return self.document.in_(self.rows.where(test(self.value)))

    def exist(self) -> Truth:
        return self.document.in_(self.rows)

    def texts(self) -> Select[Any]:
        return self.rows.where(self.value.of("text")).with_only_columns(self.value.text).distinct()


def in_column(
    kind: str, source: ColumnElement[Any], vocabulary: Select[Any], nan: bool = False
) -> ColumnValues:
    """Describe the values of a column: numbers, strings or bools; NULL is null, or NaN with `nan`."""
    there = source.is_not(None)
    kinds: dict[str, Truth] = {"number": true()} if nan else {kind: there, "null": source.is_(None)}
    text = source if kind == "text" else literal(None, Text)
    return ColumnValues(Value(kinds, cast(source, Float), text), vocabulary)


def condition(connection: Connection, node: Node, values: Callable[[str], Values]) -> Truth:
    """Turn a filter into an expression; `values` returns the values at a path."""
    if isinstance(node, Not):
        return not_(condition(connection, node.part, values))
    if isinstance(node, Group):
        parts = [condition(connection, part, values) for part in node.parts]
        return and_(true(), *parts) if node.every else or_(false(), *parts)
    return _leaf(connection, node, values(node.path))


def _leaf(connection: Connection, leaf: Leaf, values: Values) -> Truth:
    if leaf.operator == "$exists":
        return values.exist() if leaf.value else not_(values.exist())
    if leaf.operator == "$regex":
        found = connection.execute(values.texts()).scalars()
        matches = matching(leaf.value, [text for text in found if text is not None])
        return values.any(lambda value: and_(value.of("text"), one_of(connection, value.text, matches)))
    if leaf.operator == "$in":
        return _equal(connection, values, leaf.value)
    equal = leaf.operator in ("$eq", "$gte", "$lte")
    if leaf.value is None or leaf.value != leaf.value:  # null and NaN have no order
        return _equal(connection, values, [leaf.value] if equal else [])
    return values.any(lambda value: _compares(value, leaf.operator, leaf.value))


def _equal(connection: Connection, values: Values, wanted: list[Any]) -> Truth:
    """Whether a document has a value of a list; a missing value counts as null."""
    missing = not_(values.exist()) if any(one is None for one in wanted) else false()
    return or_(missing, values.any(lambda value: _equals_one(connection, value, wanted)))


def _equals_one(connection: Connection, value: Value, wanted: list[Any]) -> Truth:
    """Whether a value equals a member of a list: numbers equal numbers, strings equal strings."""
    by_kind: dict[str, list[Any]] = {}
    for kind, number, text in map(typed, wanted):
        by_kind.setdefault(kind, []).append(number if text is None else text)
    return or_(false(), *(_is_among(connection, value, kind, ones) for kind, ones in by_kind.items()))


def _is_among(connection: Connection, value: Value, kind: str, wanted: list[Any]) -> Truth:
    """Whether a value is of a kind and in a list; None stands for NaN among numbers."""
    if kind == "null" or kind not in value.kinds:
        return value.of(kind)
    if kind in _TEXTUAL:
        return _known(value, kind, one_of(connection, value.text, wanted))
    nan = and_(value.of(kind), value.number.is_(None)) if None in wanted else false()
    there = [literal(one, Float) for one in dict.fromkeys(wanted) if one is not None]
    return or_(nan, _known(value, kind, value.number.in_(there)) if there else false())


def _compares(value: Value, operator: str, other: Any) -> Truth:
    """Whether a value is $eq, $gt, ... another value of its kind."""
    if isinstance(other, dict | list):
        kind = "list" if isinstance(other, list) else "object"
        return _known(value, kind, value.text == literal(canonical(other), Text))
    if isinstance(other, str):
        return _known(value, "text", _SIGNS[operator](value.text, literal(clean(other), Text)))
    kind = "bool" if isinstance(other, bool) else "number"
    return _known(value, kind, _SIGNS[operator](value.number, literal(as_number(other), Float)))


_SIGNS: dict[str, Callable[[Any, Any], Any]] = {
    "$eq": lambda a, b: a == b,
    "$gt": lambda a, b: a > b,
    "$gte": lambda a, b: a >= b,
    "$lt": lambda a, b: a < b,
    "$lte": lambda a, b: a <= b,
}


_TEXTUAL = ("text", "list", "object")


def _known(value: Value, kind: str, test: Truth) -> Truth:
    """Restrict a test to a kind of values, so that it is false (not NULL) for NaN."""
    if kind not in value.kinds:
        return false()
    there = (value.text if kind in _TEXTUAL else value.number).is_not(None)
    return and_(value.of(kind), there, test)


def one_of(connection: Connection, source: ColumnElement[Any], values: Iterable[Any]) -> Truth:
    """Whether a column's value is among some numbers or strings, of which there may be any number."""
    values = list(values)
    if not values:
        return false()
    listed = literal(json.dumps(values), Text)
    kind = Text if isinstance(values[0], str) else Integer
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects.postgresql import JSONB

        items = func.jsonb_array_elements_text(cast(listed, JSONB)).table_valued("value")
    else:
        items = func.json_each(listed).table_valued("value")
    return source.in_(select(cast(items.c.value, kind)))
