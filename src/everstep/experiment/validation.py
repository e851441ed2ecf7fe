"""Validation of a config: pydantic checks the values, and this module words the mistakes."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from operator import getitem
from typing import Any

from pydantic import TypeAdapter, ValidationError

from everstep.errors import nearest
from everstep.experiment.config_layers import CALL, Place, dotted


class Problem(typing.NamedTuple):
    """Mistake in a config: its place, and a message with the remedy."""

    place: Place
    text: str


def validated(
    adapter: TypeAdapter[Any], value: Any, schema: Any, place: Place, problems: list[Problem]
) -> Any:
    """Convert a JSON value to a type; if it does not fit, return None and add to `problems`.

    Conversion is strict and that of JSON: a list may become a tuple and a string a path, but a string never
    becomes a number, and a boolean never an integer.
    """
    try:
        return adapter.validate_json(json.dumps(value), strict=True, extra="forbid")
    except ValidationError as error:
        problems += problems_of(error, value, schema, place)
        return None


_WANTED = {
    "an integer": ("int_type", "int_parsing", "int_from_float"),
    "a number": ("float_type", "float_parsing"),
    "a string": ("string_type",),
    "true or false": ("bool_type", "bool_parsing"),
    "a list": ("list_type", "tuple_type", "set_type", "frozen_set_type"),
    "a mapping": ("dict_type", "mapping_type", "dataclass_type", "dataclass_exact_type", "model_type"),
    "null": ("none_required",),
    "a path": ("path_type",),
    "a function": ("callable_type",),
    "a regular expression": ("pattern_type",),
}
"""Words for an expected type -> names of pydantic's errors."""


def problems_of(error: ValidationError, value: Any, schema: Any, place: Place) -> list[Problem]:
    """List the mistakes of a validation, one per place, also if a value fits no member of a union."""
    wanted: dict[Place, list[str]] = {}
    others = []
    for each in error.errors():
        inside, word = _inside(each["loc"], value), _word(each)
        if each["loc"][-1:] == ("[key]",):
            others.append(_problem_of_key(each, (*place, *inside)))
        elif word is not None:
            wanted.setdefault(inside, []).append(word)
        elif each["type"] != "needs_python_object":  # no config can hold an object of this type
            others.append(_problem(each, value, schema, place))
    found = []
    for inside, words in wanted.items():
        if any(other[: len(inside)] == inside != other for other in wanted):
            continue  # a member of the union fits up to here: the mistake is further inside
        node = reduce(getitem, inside, value)
        # An integer is a number: a single word is enough.
        if "a number" in words:
            words = [word for word in words if word != "an integer"]
        number = isinstance(node, str) and {"a number", "an integer"} & {*words} and _is_number(node)
        give = " or ".join(dict.fromkeys(words)) + (", without quotes" if number else "")
        found.append(Problem((*place, *inside), f"{node!r} is {kind_of(node)}; give {give}"))
    if not found and not others:
        give = f"give {{{CALL}: module:name}} for a call that makes it"
        found.append(Problem(place, f"{value!r} is {kind_of(value)}, and {schema} is asked for; {give}"))
    return found + others


def _word(error: Any) -> str | None:
    """Name the type that an error asks for; None if the error is not about a type."""
    if error["type"] == "is_instance_of":
        return f"a {error['ctx']['class']}"
    return next((word for word, types_ in _WANTED.items() if error["type"] in types_), None)


def _problem_of_key(error: Any, place: Place) -> Problem:
    if error["type"] == "value_error":
        return Problem(place[:-1], str(error["ctx"]["error"]))
    return Problem(place[:-1], f"the key {place[-1]!r} is {kind_of(place[-1])}; give {_word(error)}")


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _inside(location: Iterable[Any], value: Any) -> Place:
    """Turn pydantic's location into a place: leave out the names of a union's members, which are not keys."""
    inside: list[str | int] = []
    for part in location:
        if part in value if isinstance(value, Mapping) else _has_index(value, part):
            inside.append(part)
            value = value[part]
    return tuple(inside)


def _has_index(value: Any, part: Any) -> bool:
    # The index of an entry that is missing in a list of fixed length names no value.
    return isinstance(value, list) and type(part) is int and part < len(value)


def _problem(error: Any, value: Any, schema: Any, place: Place) -> Problem:
    inside = _inside(error["loc"], value)
    node = reduce(getitem, inside, value)
    kind, last = error["type"], error["loc"][-1] if error["loc"] else ""
    where = (*place, *inside)
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return Problem(where, f"unknown key {last!r}; {nearest(str(last), _keys(schema, inside[:-1]))}")
    if kind in ("missing", "missing_argument", "missing_keyword_only_argument"):
        what = f"entry {last} of the list" if isinstance(last, int) else repr(last)
        return Problem(where, f"{what} is missing; give it")
    if kind == "value_error":
        return Problem(where, str(error["ctx"]["error"]))
    wanted = error["msg"].replace("Input should be ", "give ").replace("Input should ", "it must ")
    return Problem(where, f"{node!r} is {kind_of(node)}; {wanted}")


def kind_of(value: Any) -> str:
    """Name the type of a value."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    return _KINDS.get(type(value), f"a {type(value).__name__}")


_KINDS = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list"}


def _keys(schema: Any, inside: Place) -> set[str]:
    """Return the keys that a schema has at a place."""
    for part in inside:
        schema = next((s for s in (_below(t, part) for t in members(schema)) if s is not None), None)
    return {name for each in members(schema) for name in _fields(each)}


def members(schema: Any) -> Iterable[Any]:
    """Return the members of a union, or the schema itself if it is not a union."""
    if typing.get_origin(schema) in (typing.Union, types.UnionType):
        return typing.get_args(schema)
    return (schema,)


def _below(schema: Any, part: str | int) -> Any:
    if part in (fields := _fields(schema)):
        return fields[str(part)]
    arguments = typing.get_args(schema)
    return arguments[-1] if arguments else None


def _fields(schema: Any) -> dict[str, Any]:
    """Return the fields of a dataclass or pydantic model, name to type."""
    if dataclasses.is_dataclass(schema):
        hints = typing.get_type_hints(schema)
        return {field.name: hints[field.name] for field in dataclasses.fields(schema)}
    models = getattr(schema, "model_fields", {})
    return {name: field.annotation for name, field in models.items()}


def told(problems: Iterable[Problem], origin: Callable[[Place], str] = lambda place: "") -> str:
    """Join mistakes into a message, each with its place.

    Args:
        origin: returns the file and line of a place; "" if there is none.
    """
    lines = []
    for problem in problems:
        where = [each for each in (origin(problem.place), dotted(problem.place)) if each]
        lines.append(": ".join([*where, problem.text]))
    if len(lines) == 1:
        return lines[0]
    return "\n  ".join([f"{len(lines)} mistakes:", *lines])
