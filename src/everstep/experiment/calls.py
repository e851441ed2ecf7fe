"""`Call`: a function or class by import path, with its arguments checked before it is called."""

from __future__ import annotations

import copy
import inspect
import json
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import ConfigDict, TypeAdapter
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError
from pydantic_core import core_schema

from everstep.errors import ConfigError, nearest
from everstep.experiment.config_layers import CALL, Place
from everstep.experiment.import_paths import imported
from everstep.experiment.validation import Problem, validated
from everstep.schedule import At, Every, Never, Schedule


@dataclass(frozen=True)
class Call:
    """A function or class that a config names, and the arguments for it.

        optimizer: {call: torch.optim:AdamW, lr: 1e-3}

    Arguments may be calls themselves.  Without arguments the import path alone will do.

    Attributes:
        call: import path of the function or class, `module:name` or `module:Class.name`.
        arguments: name to value, as the config has them.
    """

    call: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Any) -> Self:
        """Make a call from a config's value: an import path, or a mapping with one under `call`.

        Raises:
            ConfigError: the value has no import path.
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, str):
            given = {CALL: given}
        path = given.get(CALL) if isinstance(given, Mapping) else None
        if not isinstance(path, str):
            rest = dict(given) if isinstance(given, Mapping) else {"argument": "value"}
            shown = "".join(f", {name}: {value}" for name, value in rest.items() if name != CALL)
            raise ConfigError(f"{given!r} names nothing to call; give {{{CALL}: module:name{shown}}}")
        return cls(path, {name: value for name, value in given.items() if name != CALL})

    def tree(self) -> dict[str, Any]:
        """Return the mapping that `of` takes."""
        return {CALL: self.call, **self.arguments}

    def inside(self, place: Place) -> Place:
        """Return the place of the arguments of a call that stands at `place`."""
        return place

    def completed(self, place: Place, at_default: list[Place], supplied: int = 0) -> Self:
        """Return a copy with the signature's plain defaults as arguments; calls inside are completed, too.

        Args:
            at_default: collects the place of each argument that equals its default, given or not.
            supplied: number of positional arguments that come from elsewhere.
        """
        place = self.inside(place)
        defaults = _plain_defaults(_named(imported(self.call), supplied))
        arguments = {n: _completed(v, (*place, n), at_default) for n, v in self.arguments.items()}
        found = arguments | {name: value for name, value in defaults.items() if name not in arguments}
        at_default += [(*place, n) for n, value in defaults.items() if _same(found[n], value)]
        return type(self)(self.call, found)

    def __call__(self, *supplied: Any) -> Any:
        """Check the arguments, and call the function with them.

        Args:
            supplied: positional arguments, before those of the config.
        """
        problems: list[Problem] = []
        arguments = self.checked((), problems, len(supplied))
        if problems:
            raise ConfigError("; ".join(problem.text for problem in problems))
        return imported(self.call)(*supplied, **{name: _made(value) for name, value in arguments.items()})

    def checked(self, place: Place, problems: list[Problem], supplied: int = 0) -> dict[str, Any]:
        """Return the arguments, converted to the types of the signature; nothing is called.

        Args:
            problems: collects each mistake.
            supplied: number of positional arguments that come from elsewhere.
        """
        place = self.inside(place)
        try:
            return checked_arguments(imported(self.call), self, place, problems, supplied=supplied)
        except ConfigError as error:
            problems.append(Problem((*place, CALL), str(error)))
            return {}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.of, serialization=core_schema.plain_serializer_function_ser_schema(cls.tree)
        )


def checked_arguments(
    target: Any, call: Call, place: Place, problems: list[Problem], supplied: int = 0
) -> dict[str, Any]:
    """Convert a call's arguments to the types of the target's signature; calls inside become `Call`.

    Args:
        problems: collects each mistake.
        supplied: number of positional arguments that come from elsewhere.
    """
    if not callable(target):
        problems.append(Problem((*place, CALL), f"{call.call!r} is {target!r}; give a function or a class"))
        return {}
    named = _named(target, supplied)
    defaults = _plain_defaults(named)
    who = getattr(target, "__name__", call.call)
    annotations = _inherited(target) | {each.name: each.annotation for each in _parameters(target) or ()}
    arguments = {}
    wrong = dict(misfits(target, call.arguments, supplied))
    for name, value in call.arguments.items():
        if name in defaults and _same(value, defaults[name]):
            # A default is right whatever its annotation says, as in `size: int = None`.
            arguments[name] = named[name].default
        elif name not in wrong:
            arguments[name] = _converted(annotations.get(name, Any), value, (*place, name), problems)
    for name, fault in wrong.items():
        at = (*place, name) if name in call.arguments else place
        problems.append(Problem(at, f"{who}() {fault}"))
    return arguments


def misfits(
    function: Any, given: Collection[str], supplied: int = 0, besides: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """Yield each argument that a function lacks or does not take: name, and the words after "FUNCTION() ".

    Args:
        given: names of the config's arguments.
        supplied: number of positional arguments that come from elsewhere, before those of the config.
        besides: names of arguments that come from elsewhere.
    """
    parameters = _parameters(function)
    if parameters is None:  # written in C, without a signature
        return
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    left = [p for p in parameters if p not in positional[:supplied]]
    by_name = {p.name for p in left if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    # `checked_keywords` notes there which names `**` arguments may have.
    more = getattr(_function(function), "known_keywords", None)
    takes_any = more is None and any(p.kind is p.VAR_KEYWORD for p in parameters)
    known = by_name | (set(more or ()) - {p.name for p in positional})
    for name in besides:
        if name not in known and not takes_any:
            yield name, f"is called with {name}=; add this argument to it"
    for name in given:
        if name not in known and not takes_any:
            yield name, f"has no argument {name!r}; {nearest(name, known - set(besides))}"
    for each in left:
        if each.default is not each.empty or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            continue
        if each.kind is each.POSITIONAL_ONLY:
            yield (
                each.name,
                f"takes {each.name!r} by position only; write a function that takes {each.name!r} by name",
            )
        elif each.name not in given and each.name not in besides:
            yield each.name, f"needs {each.name!r}; give it"


def _function(target: Any) -> Any:
    return target.__init__ if inspect.isclass(target) else target


def _parameters(target: Any) -> list[inspect.Parameter] | None:
    """List the parameters of a signature; None without one, as for some functions in C."""
    try:
        return list(inspect.signature(target, eval_str=True).parameters.values())
    except ValueError:
        return None
    except (NameError, TypeError, SyntaxError, AttributeError):  # names that only type checkers see
        pass
    # Without evaluation: an annotation that stays a string counts as Any.
    try:
        found = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return None
    return [p.replace(annotation=Any) if isinstance(p.annotation, str) else p for p in found]


def _inherited(target: Any) -> dict[str, Any]:
    """Types by name of the arguments that a class with `**options` may hand on to its base classes."""
    found: dict[str, Any] = {}
    for base in target.__mro__[1:-1] if inspect.isclass(target) else ():
        parameters = _parameters(base) or []
        for p in parameters:
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
                found.setdefault(p.name, p.annotation)
        # A class without `**options` hands nothing further on.
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return found


def _named(target: Any, supplied: int) -> dict[str, inspect.Parameter]:
    """Parameters that a config may give by name, without the first `supplied`; none without a signature."""
    parameters = _parameters(target) or []
    return {p.name: p for p in parameters[supplied:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _plain_defaults(named: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Defaults that a config file can hold, by name."""
    return {name: _plain(p.default) for name, p in named.items() if _is_plain(p.default)}


def _is_plain(value: Any) -> bool:
    # Exact types: JSON would give a subclass back as its base class.
    if type(value) is dict:
        return CALL not in value and all(type(k) is str and _is_plain(part) for k, part in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value


def _same(value: Any, default: Any) -> bool:
    """Whether JSON writes both alike: 1 equals neither 1.0 nor true."""
    return _is_plain(value) and json.dumps(value, sort_keys=True) == json.dumps(default, sort_keys=True)


def _completed(value: Any, place: Place, at_default: list[Place]) -> Any:
    """Complete each call in a value."""
    if isinstance(value, Mapping) and CALL in value:
        return Call.of(value).completed(place, at_default).tree()
    if isinstance(value, Mapping):
        return {key: _completed(each, (*place, key), at_default) for key, each in value.items()}
    if isinstance(value, list):
        return [_completed(each, (*place, at), at_default) for at, each in enumerate(value)]
    return value


def _converted(annotation: Any, value: Any, place: Place, problems: list[Problem]) -> Any:
    """Convert a value of a config to the type of an annotation."""
    if _has_calls(value):
        return _with_calls(value, place, problems)
    # Import paths and schedules are converted here: pydantic knows neither.
    types_ = set(_alternatives(annotation))
    if isinstance(value, str) and ":" in value and types_ & _CALLABLES:
        return _attempt(lambda: imported(value), place, problems)
    if value is not None and any(inspect.isclass(t) and issubclass(t, Schedule) for t in types_):
        return _attempt(lambda: schedule(value), place, problems)
    # pydantic makes a lazy iterator of an Iterable, which can be read only once.
    if annotation in (Any, inspect.Parameter.empty) or types_ & _ITERABLES:
        return value
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation, config=_config(annotation))
        return validated(adapter, value, annotation, place, problems)
    except (PydanticUserError, PydanticUndefinedAnnotation):
        return value  # a type that only the callee understands


_CALLABLES = {Callable, typing.Callable, type, types.FunctionType}
_ITERABLES = {Iterable, Iterator}


def _config(annotation: Any) -> ConfigDict | None:
    """Choose pydantic's options; None for types whose own options pydantic insists on."""
    own = typing.get_origin(annotation) is None and (
        hasattr(annotation, "__dataclass_fields__") or typing.is_typeddict(annotation)
    )
    return None if own else ConfigDict(arbitrary_types_allowed=True)


def _alternatives(annotation: Any) -> Iterator[Any]:
    """Yield the types that an annotation allows, without their parameters."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        for each in typing.get_args(annotation):
            yield from _alternatives(each)
    elif origin is typing.Annotated:
        yield from _alternatives(typing.get_args(annotation)[0])
    elif isinstance(origin or annotation, typing.Hashable):
        yield origin or annotation


def _attempt(make: Callable[[], Any], place: Place, problems: list[Problem]) -> Any:
    try:
        return make()
    except ConfigError as error:
        problems.append(Problem(place, str(error)))
        return None


def schedule(value: Any) -> Schedule:
    """Make a schedule of {steps: 100}, {epochs: 1}, {seconds: 60}, {at: [10, 20]}, never, or a list.

    A list is due when one of its schedules is.
    """
    if value == "never":
        return Never()
    if isinstance(value, list) and value:
        found = schedule(value[0])
        for each in value[1:]:
            found = found | schedule(each)
        return found
    if isinstance(value, Mapping) and value.keys() == {"at"}:
        steps = value["at"] if isinstance(value["at"], list) else [value["at"]]
        return At(*steps)
    if isinstance(value, Mapping):
        return Every(**value)
    raise ConfigError(
        f"{value!r} is not a schedule; give {{steps: 100}}, {{epochs: 1}}, {{seconds: 60}}, "
        "{at: [10, 20]}, never, or a list of them"
    )


def _has_calls(value: Any) -> bool:
    if isinstance(value, Mapping):
        return CALL in value or any(map(_has_calls, value.values()))
    return isinstance(value, list) and any(map(_has_calls, value))


def _with_calls(value: Any, place: Place, problems: list[Problem]) -> Any:
    """Replace each call in a value by a checked `Call`."""
    if isinstance(value, Mapping) and CALL in value:
        call = _attempt(lambda: Call.of(value), place, problems)
        if call is not None:
            call.checked(place, problems)
        return call
    if isinstance(value, Mapping):
        return {key: _with_calls(each, (*place, key), problems) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_calls(each, (*place, at), problems) for at, each in enumerate(value)]
    return value


def _made(value: Any) -> Any:
    """Make each call in a value; the rest is copied, so that no callee changes it for a second call."""
    if isinstance(value, Call):
        return value()
    if isinstance(value, dict):
        return {key: _made(each) for key, each in value.items()}
    return [_made(each) for each in value] if isinstance(value, list) else copy.deepcopy(value)
