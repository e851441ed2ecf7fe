"""`Call`: a function or class by import path, with its arguments checked before it is called."""

from __future__ import annotations

import copy
import inspect
import json
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, TypeAdapter
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError
from pydantic_core import core_schema

from everstep.errors import ConfigError, nearest
from everstep.experiment.config_layers import Place
from everstep.experiment.import_paths import CALL, imported
from everstep.experiment.validation import Mistake, Mistakes, members, placed, validated
from everstep.schedule import At, Every, Never, Schedule


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
            function = self._function()
            values = converted(function, self.arguments, self.supplied, complete)
            arguments |= {name: value for name, value in values.items() if _has_calls(arguments[name])}
            for name, default in _plain_defaults(function, self.supplied).items():
                if _json(arguments.setdefault(name, json.loads(default))) == default:
                    at_default.append((name,))
        places = tuple((*self.inside(), *place) for place in at_default)
        return replace(self, arguments=arguments, at_default=places)

    def __call__(self, *supplied: Any) -> Any:
        """Check the arguments, and call the function with them."""
        function = self._function()
        # copied, so that no callee changes them for a second call
        arguments = copy.deepcopy(dict(self.arguments))
        values = converted(function, arguments, len(supplied), lambda call, place: call())
        try:
            return function(*supplied, **values)
        except Exception as error:
            error.add_note(f"in the config's call of {self.call} with {', '.join(values) or 'no arguments'}")
            raise

    def _function(self) -> Any:
        with placed(CALL):
            if not callable(function := imported(self.call)):
                raise ConfigError(f"{self.call!r} is {function!r}; give a function or a class")
            return function

    @classmethod
    def _validated(cls, value: Any, info: core_schema.ValidationInfo) -> Self:
        call = cls.of(value)
        return call.completed() if (info.context or {}).get("imports", True) else call

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.with_info_plain_validator_function(
            cls._validated, serialization=core_schema.plain_serializer_function_ser_schema(cls.tree)
        )


class CallWith(Call):
    """A call whose first argument comes from elsewhere: the model's parameters, or the optimizer."""

    supplied = 1


def converted(
    function: Any, arguments: Mapping[str, Any], supplied: int, do: Callable[[Call, Place], Any]
) -> dict[str, Any]:
    """Convert arguments to the types of a function's signature, or raise all mistakes.

    An argument that equals its default is left out: a default is right whatever its annotation says.
    """
    mistakes, values = Mistakes(), {}
    faults = dict(argument_faults(function, arguments, supplied))
    for name, fault in faults.items():
        place = (name,) if name in arguments else ()
        mistakes.append(Mistake(place, f"{getattr(function, '__name__', function)}() {fault}"))
    defaults = _plain_defaults(function, supplied)
    annotations = _inherited(function) | {each.name: each.annotation for each in _parameters(function) or ()}
    for name, value in arguments.items():
        if name in faults or (name in defaults and _json(value) == defaults[name]):
            continue
        if _has_calls(value):
            values[name] = _with_calls(value, (name,), mistakes, do)
        else:
            with mistakes.at(name):
                values[name] = _as_type(annotations.get(name, Any), value)
    mistakes.stop()
    return values


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
