"""Mistakes in a config, collected with their places; pydantic checks the values, this module words it."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from operator import getitem
from typing import Any

from pydantic import TypeAdapter, ValidationError

from everstep.errors import ConfigError, nearest
from everstep.experiment.config_layers import Place, dotted
from everstep.experiment.import_paths import CALL


class Mistake(typing.NamedTuple):
    """Mistake in a config: its place, and a message with the remedy."""

    place: Place
    text: str


class ConfigMistakes(ConfigError):
    """All mistakes of a config, or of a part of it; `origin` returns the file and line of a place."""

    def __init__(self, mistakes: Iterable[Mistake], origin: Callable[[Place], str] = lambda _: "") -> None:
        self.mistakes = list(mistakes)
        parts = ((origin(place), dotted(place), text) for place, text in self.mistakes)
        lines = [": ".join(filter(None, part)) for part in parts]
        many = "\n  ".join([f"{len(lines)} mistakes:", *lines])
        super().__init__(lines[0] if len(lines) == 1 else many)


class Mistakes(list[Mistake]):
    """Mistakes that are collected, to be raised together."""

    @contextmanager
    def at(self, *place: str | int) -> Iterator[None]:
        """Collect the mistakes of the block, which is about the value at a place."""
        try:
            yield
        except ConfigMistakes as error:
            self += [Mistake((*place, *each.place), each.text) for each in error.mistakes]
        except ConfigError as error:
            self.append(Mistake(place, str(error)))

    def stop(self) -> None:
        """Raise what has been collected."""
        if self:
            raise ConfigMistakes(self)


@contextmanager
def placed(*place: str | int) -> Iterator[None]:
    """Raise the mistakes of the block, which is about the value at a place, with that place."""
    mistakes = Mistakes()
    with mistakes.at(*place):
        yield
    mistakes.stop()


def validated(
    adapter: TypeAdapter[Any], value: Any, schema: Any, context: Mapping[str, Any] | None = None
) -> Any:
    """Convert a JSON value to a type, strictly: no string becomes a number; or raise `ConfigMistakes`."""
    try:
        return adapter.validate_json(json.dumps(value), strict=True, extra="forbid", context=context)
    except ValidationError as error:
        raise ConfigMistakes(mistakes_of(error, value, schema)) from None


_WORDS = {
    "a integer": "an integer",
    "a boolean": "true or false",
    "a array": "a list",
    "an object": "a mapping",
    "a dictionary": "a mapping",
    "callable": "a function",
    "a pattern": "a regular expression",
}
"""Words of pydantic for a type -> ours; the others stay as they are."""


def mistakes_of(error: ValidationError, value: Any, schema: Any) -> list[Mistake]:
    """List the mistakes of a validation; what the members of a union ask for at one place is one mistake."""
    alternatives: dict[Place, list[str]] = {}
    mistakes = Mistakes()
    for each in error.errors():
        place, kind = _place(each["loc"], value), each["type"]
        is_word = each["msg"].startswith("Input should be ")
        phrase = re.sub("^Input should be |(, got|, unable| or instance).*", "", each["msg"])
        phrase = phrase.replace("a valid ", "a ").replace("greater", "a number greater")
        phrase = _WORDS.get(phrase, phrase)
        if each["loc"][-1:] == ("[key]",) and is_word:
            key = each["input"]
            mistakes.append(Mistake(place[:-1], f"the key {key!r} is {kind_of(key)}; give {phrase}"))
        elif kind == "value_error":
            cause = each["ctx"]["error"]
            with mistakes.at(*place[: -1 if "[key]" in each["loc"] else None]):
                raise cause if isinstance(cause, ConfigError) else ConfigError(str(cause))
        elif kind in ("unexpected_keyword_argument", "extra_forbidden"):
            hint = nearest(str(place[-1]), _keys(schema, place[:-1]))
            mistakes.append(Mistake(place, f"unknown key {place[-1]!r}; {hint}"))
        elif kind.startswith("missing"):
            mistakes.append(Mistake(place, f"{each['loc'][-1]!r} is missing; give it"))
        elif is_word:
            alternatives.setdefault(place, []).append(phrase)
        elif kind != "needs_python_object":  # no config can hold an object of this type
            mistakes.append(Mistake(place, f"{reduce(getitem, place, value)!r}: {phrase}; correct it"))
    of_type = []
    for place, expected in alternatives.items():
        if any(other[: len(place)] == place != other for other in alternatives):
            continue  # a member of the union fits up to here: the mistake is further inside
        node = reduce(getitem, place, value)
        expected = [phrase for phrase in expected if phrase != "an integer" or "a number" not in expected]
        advice = " or ".join(dict.fromkeys(expected))
        of_type.append(Mistake(place, f"{node!r} is {kind_of(node)}; give {advice}"))
    if not of_type and not mistakes:
        advice = f"give {{{CALL}: module:name}} for a call that makes it"
        of_type.append(Mistake((), f"{value!r} is {kind_of(value)}, and {schema} is asked for; {advice}"))
    return of_type + mistakes


def _place(location: Iterable[Any], value: Any) -> Place:
    """Turn pydantic's location into a place: leave out the names of a union's members, which are not keys."""
    place: list[str | int] = []
    for part in location:
        is_index = isinstance(value, list) and type(part) is int and part < len(value)
        if is_index or (isinstance(value, Mapping) and part in value):
            place.append(part)
            value = value[part]
    return tuple(place)


def kind_of(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    return _KINDS.get(type(value), f"a {type(value).__name__}")


_KINDS = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list"}


def _keys(schema: Any, place: Place) -> set[str]:
    schemas = [schema]
    for part in place:
        inside = ((_fields(each).get(str(part)), typing.get_args(each)) for each in members(schemas))
        schemas = [field or arguments[-1] for field, arguments in inside if field or arguments]
    return {name for each in members(schemas) for name in _fields(each)}


def members(schemas: Iterable[Any]) -> Iterator[Any]:
    """Yield types without their annotations, with the members of a union instead of the union."""
    for each in schemas:
        origin, arguments = typing.get_origin(each), typing.get_args(each)
        if origin in (typing.Union, types.UnionType):
            yield from members(arguments)
        elif origin is typing.Annotated:
            yield from members(arguments[:1])
        else:
            yield each


def _fields(schema: Any) -> dict[str, Any]:
    """Return the fields of a dataclass or pydantic model, name to type."""
    if dataclasses.is_dataclass(schema):
        hints = typing.get_type_hints(schema)
        return {field.name: hints[field.name] for field in dataclasses.fields(schema)}
    return {name: field.annotation for name, field in getattr(schema, "model_fields", {}).items()}
