"""`Call`: a function or class by import path, with its arguments checked; and mistakes with their places."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import getitem
from typing import Any, ClassVar, Self, TypeAlias

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError
from pydantic_core import core_schema

from everstep.errors import ConfigError, nearest
from everstep.experiment.import_paths import CALL, imported
from everstep.schedule import At, Every, Never, Schedule

Place: TypeAlias = tuple[str | int, ...]
"""Keys of mappings and indices of lists, from the root of a tree to a value."""


def dotted(place: Place) -> str:
    """Write a place as an override does, with dots."""
    return ".".join(map(str, place))


@dataclass(frozen=True)
class Call:
    """A function or class that a config names, and the arguments for it.

        optimizer: {call: torch.optim:AdamW, lr: 1e-3}

    Arguments may be calls themselves.  Without arguments the import path alone will do.

    Attributes:
        call: import path of the function or class, `module:name` or `module:Class.name`.
        arguments: name to value, as the config has them.
        at_default: places, inside the call, of arguments that equal their default.
        supplied: number of positional arguments that come from elsewhere, before those of the config.
    """

    call: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    at_default: tuple[Place, ...] = field(default=(), compare=False, repr=False)
    supplied: ClassVar[int] = 0

    @classmethod
    def of(cls, value: Any) -> Self:
        """Make a call from a config's value: an import path, or a mapping with one under `call`."""
        if isinstance(value, str):
            value = {CALL: value}
        path = value.get(CALL) if isinstance(value, Mapping) else None
        if not isinstance(path, str):
            rest = value if isinstance(value, Mapping) else {"argument": "value"}
            example = "".join(f", {name}: {part}" for name, part in rest.items() if name != CALL)
            raise ConfigError(f"{value!r} names nothing to call; give {{{CALL}: module:name{example}}}")
        return cls(path, {name: part for name, part in value.items() if name != CALL})

    def tree(self) -> dict[str, Any]:
        """Return the mapping that `of` takes."""
        return {CALL: self.call, **self.arguments}

    def inside(self) -> Place:
        """Return the place of the arguments, from that of the call."""
        return ()

    def completed(self) -> Self:
        """Check the arguments, and return a copy with the signature's plain defaults as further arguments."""
        at_default, arguments = list[Place](), dict(self.arguments)

        def complete(call: Call, place: Place) -> dict[str, Any]:
            call = call.completed()
            at_default.extend((*place, *each) for each in call.at_default)
            return call.tree()

        with placed(*self.inside()):
            function, values = self._converted(self.supplied, complete)
            for name, value in values.items():
                # 1 for a float is recorded as the 1.0 that the function gets
                if isinstance(value, float) or _has_calls(arguments[name]):
                    arguments[name] = value
            for name, default in _plain_defaults(function, self.supplied).items():
                if _json(arguments.setdefault(name, json.loads(default))) == default:
                    at_default.append((name,))
        places = tuple((*self.inside(), *place) for place in at_default)
        return replace(self, arguments=arguments, at_default=places)

    def __call__(self, *supplied: Any) -> Any:
        """Check the arguments, and call the function with them."""
        function, values = self._converted(len(supplied), lambda call, place: call())
        try:
            return function(*supplied, **values)
        except Exception as error:
            error.add_note(f"in the config's call of {self.call} with {', '.join(values) or 'no arguments'}")
            raise

    def _converted(self, supplied: int, do: Callable[[Call, Place], Any]) -> tuple[Any, dict[str, Any]]:
        """Return the function, and the arguments with the types of its signature; or raise all mistakes.

        An argument that equals its default is left out: a default is right whatever its annotation says.
        """
        with placed(CALL):
            if not callable(function := imported(self.call)):
                raise ConfigError(f"{self.call!r} is {function!r}; give a function or a class")
        mistakes, values = Mistakes(), {}
        faults = dict(argument_faults(function, self.arguments, supplied))
        for name, fault in faults.items():
            place = (name,) if name in self.arguments else ()
            mistakes.append(Mistake(place, f"{getattr(function, '__name__', function)}() {fault}"))
        defaults = _plain_defaults(function, supplied)
        annotations = _inherited(function) | {p.name: p.annotation for p in _parameters(function) or ()}
        # copied, so that no callee changes them for a second call
        for name, value in copy.deepcopy(dict(self.arguments)).items():
            if name in faults or (name in defaults and _json(value) == defaults[name]):
                continue
            if _has_calls(value):
                values[name] = _with_calls(value, (name,), mistakes, do)
            else:
                with mistakes.at(name):
                    values[name] = _as_type(annotations.get(name, Any), value)
        mistakes.stop()
        return function, values

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        def read(value: Any, info: core_schema.ValidationInfo) -> Call:
            call = cls.of(value)
            return call.completed() if (info.context or {}).get("imports", True) else call

        return core_schema.with_info_plain_validator_function(
            read, serialization=core_schema.plain_serializer_function_ser_schema(cls.tree)
        )


class CallWith(Call):
    """A call whose first argument comes from elsewhere: the model's parameters, or the optimizer."""

    supplied = 1


def argument_faults(
    function: Any, arguments: Collection[str], supplied: int = 0, besides: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """Yield each argument that a function lacks or does not take: name, and the words after "FUNCTION() "."""
    if (parameters := _parameters(function)) is None:  # written in C, without a signature
        return
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = [p for p in parameters if p not in positional[:supplied]]
    # `checked_keywords` notes there which names `**` arguments may have.
    more = getattr(function.__init__ if inspect.isclass(function) else function, "known_keywords", None)
    takes_any = more is None and any(p.kind is p.VAR_KEYWORD for p in parameters)
    known = {p.name for p in rest if p.kind in _BY_NAME} | (set(more or ()) - {p.name for p in positional})
    for name in (*besides, *arguments):
        if name in known or takes_any:
            continue
        hint = f"has no argument {name!r}; {nearest(name, known - set(besides))}"
        yield name, f"is called with {name}=; add this argument to it" if name in besides else hint
    for p in rest:
        is_needed = p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        if is_needed and p.kind is p.POSITIONAL_ONLY:
            yield p.name, f"takes {p.name!r} by position only; write a function that takes it by name"
        elif is_needed and p.name not in arguments and p.name not in besides:
            yield p.name, f"needs {p.name!r}; give it"


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _parameters(function: Any) -> list[inspect.Parameter] | None:
    """List the parameters of a signature; None without one, as for some functions in C."""
    for evaluated in (True, False):  # annotations may be names that only type checkers see
        try:
            parameters = inspect.signature(function, eval_str=evaluated).parameters.values()
        except (ValueError, NameError, TypeError, SyntaxError, AttributeError):
            continue
        return [p.replace(annotation=Any) if isinstance(p.annotation, str) else p for p in parameters]
    return None


def _inherited(function: Any) -> dict[str, Any]:
    """Types by name of the arguments that a class with `**options` may hand on to its base classes."""
    annotations: dict[str, Any] = {}
    for base in function.__mro__[1:-1] if inspect.isclass(function) else ():
        parameters = _parameters(base) or []
        annotations = {p.name: p.annotation for p in parameters if p.kind in _BY_NAME} | annotations
        # A class without `**options` hands nothing further on.
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return annotations


def _plain_defaults(function: Any, supplied: int) -> dict[str, str]:
    """Defaults that a config file can hold, as JSON, without those of the first `supplied` parameters."""
    parameters = (_parameters(function) or [])[supplied:]
    defaults = {p.name: _json(p.default) for p in parameters if p.kind in _BY_NAME}
    return {name: default for name, default in defaults.items() if default is not None}


def _json(value: Any) -> str | None:
    """Write a value as JSON, which tells 1, 1.0 and true apart; None where JSON has no such value."""
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError):
        return None


def _has_calls(value: Any) -> bool:
    if isinstance(value, Mapping):
        return CALL in value or any(map(_has_calls, value.values()))
    return isinstance(value, list) and any(map(_has_calls, value))


def _with_calls(value: Any, place: Place, mistakes: Mistakes, do: Callable[[Call, Place], Any]) -> Any:
    """Replace each call in a value by what `do` makes of it."""
    if isinstance(value, Mapping) and CALL in value:
        with mistakes.at(*place):
            return do(Call.of(value), place)
    if isinstance(value, Mapping):
        return {key: _with_calls(each, (*place, key), mistakes, do) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_calls(each, (*place, at), mistakes, do) for at, each in enumerate(value)]
    return value


def _as_type(annotation: Any, value: Any) -> Any:
    # Import paths and schedules are converted here: pydantic knows neither.
    kinds = [typing.get_origin(each) or each for each in members([annotation])]
    if isinstance(value, str) and ":" in value and any(kind in _CALLABLES for kind in kinds):
        return imported(value)
    if value is not None and any(inspect.isclass(kind) and issubclass(kind, Schedule) for kind in kinds):
        return schedule(value)
    # pydantic makes a lazy iterator of an Iterable, which can be read only once.
    if any(kind in (Any, inspect.Parameter.empty, Iterable, Iterator) for kind in kinds):
        return value
    # Some types insist on options of their own.
    for config in (ConfigDict(arbitrary_types_allowed=True), None):
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(annotation, config=config)
            return validated(adapter, value, annotation)
        except (PydanticUserError, PydanticUndefinedAnnotation):
            continue
    return value  # a type that only the callee understands


_CALLABLES = (Callable, typing.Callable, type, types.FunctionType)


def schedule(value: Any) -> Schedule:
    """Make a schedule of {steps: 100}, {epochs: 1}, {seconds: 60}, {at: [10, 20]}, never, or a list.

    A list is due when one of its schedules is.
    """
    match value:
        case "never":
            return Never()
        case [first]:
            return schedule(first)
        case [*others, last]:
            return schedule(others) | schedule(last)
        case {"at": steps, **more} if not more:
            return At(*steps) if isinstance(steps, list) else At(steps)
        case dict():
            return Every(**value)
    raise ConfigError(
        f"{value!r} is not a schedule; give {{steps: 100}}, {{epochs: 1}}, {{at: [10, 20]}}, never, or a list"
    )


# ------------------------------------------------------------------------- mistakes, with their places


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


def validated(adapter: TypeAdapter[Any], value: Any, schema: Any, context: Any = None) -> Any:
    """Convert a JSON value to a type, strictly: no string becomes a number; or raise `ConfigMistakes`."""
    try:
        text = json.dumps(value)
    except TypeError:
        raise ConfigError(
            f"{value!r} is nothing that a config can hold; give plain values, or a call"
        ) from None
    try:
        return adapter.validate_json(text, strict=True, extra="forbid", context=context)
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
