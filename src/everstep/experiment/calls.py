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
from everstep.experiment.layers import CALL, Place
from everstep.experiment.mistakes import Problem, validated
from everstep.experiment.paths import imported
from everstep.schedule import At, Every, Never, Schedule


@dataclass(frozen=True)
class Call:
    """A function or class that a config names, and the arguments for it.

        optimizer: {call: torch.optim:AdamW, lr: 1e-3}

    Arguments may be calls themselves.  Without arguments the import path alone will do.

    Attributes:
        call: its import path, `module:name` or `module:Class.name`.
        arguments: name to value, as the config has them.
    """

    call: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    _ready: tuple[int, dict[str, Any]] | None = field(default=None, repr=False, compare=False)
    """Once checked: how many arguments come from elsewhere, and its own, as the function takes them."""

    @classmethod
    def of(cls, given: Any) -> Self:
        """From what a config has.

        Raises:
            ConfigError: it has no import path.
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, str):
            given = {CALL: given}
        path = given.get(CALL) if isinstance(given, Mapping) else None
        if not isinstance(path, str):
            raise ConfigError(
                f"{given!r} names nothing to call; give {{{CALL}: module:name, argument: value}}"
            )
        return cls(path, {name: value for name, value in given.items() if name != CALL})

    def tree(self) -> dict[str, Any]:
        """As `of` takes it."""
        return {CALL: self.call, **self.arguments}

    def inside(self, place: Place) -> Place:
        """Where its arguments stand, if it stands at `place`."""
        return place

    def completed(self, place: Place, at_default: list[Place], late: int = 0) -> Self:
        """With the defaults of its signature that are plain values as arguments, and calls inside so, too.

        Args:
            at_default: takes the place of each argument that is the default, given or not.
            late: how many positional arguments come from elsewhere.
        """
        place = self.inside(place)
        defaults = _plain_defaults(_named(imported(self.call), late))
        arguments = {n: _completed(v, (*place, n), at_default) for n, v in self.arguments.items()}
        found = arguments | {name: value for name, value in defaults.items() if name not in arguments}
        at_default += [(*place, n) for n, value in defaults.items() if _same(found[n], value)]
        return type(self)(self.call, found, self._ready)  # a default is no argument to check

    def __call__(self, *late: Any) -> Any:
        """Call it.

        Args:
            late: what goes before the config's arguments.

        Raises:
            ConfigError: what the config says cannot be right.
        """
        ready = self._ready
        if ready is None or ready[0] != len(late):
            problems: list[Problem] = []
            ready = self.checked((), problems, len(late))._ready
            if ready is None:
                raise ConfigError("; ".join(problem.text for problem in problems))
        return imported(self.call)(*late, **{name: _made(value) for name, value in ready[1].items()})

    def checked(self, place: Place, problems: list[Problem], late: int = 0) -> Self:
        """The same, which checks its arguments no more when it is called; nothing is called here.

        Args:
            problems: takes what is wrong.
            late: how many positional arguments come from elsewhere.
        """
        found: list[Problem] = []
        place, ready = self.inside(place), None
        try:
            ready = late, checked_arguments(imported(self.call), self, place, found, late=late)
        except ConfigError as error:
            found.append(Problem((*place, CALL), str(error)))
        problems += found
        return type(self)(self.call, self.arguments, None if found else ready)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.of, serialization=core_schema.plain_serializer_function_ser_schema(cls.tree)
        )


def checked_arguments(
    target: Any, call: Call, place: Place, problems: list[Problem], late: int = 0
) -> dict[str, Any]:
    """The arguments as `target` takes them: by its signature, with calls inside as `Call`.

    Args:
        problems: takes what is wrong.
        late: how many positional arguments come from elsewhere.
    """
    if not callable(target):
        problems.append(Problem((*place, CALL), f"{call.call!r} is {target!r}; give a function or a class"))
        return {}
    named = _named(target, late)
    defaults = _plain_defaults(named)
    who = getattr(target, "__name__", call.call)
    annotations = _inherited(target) | {each.name: each.annotation for each in _parameters(target) or ()}
    arguments = {}
    wrong = dict(misfits(target, call.arguments, late))
    for name, value in call.arguments.items():
        if name in defaults and _same(value, defaults[name]):
            arguments[name] = named[name].default  # whatever its type is said to be
        elif name not in wrong:
            arguments[name] = _converted(annotations.get(name, Any), value, (*place, name), problems)
    for name, fault in wrong.items():
        at = (*place, name) if name in call.arguments else place
        problems.append(Problem(at, f"{who}() {fault}"))
    return arguments


def misfits(
    function: Any, given: Collection[str], late: int = 0, besides: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """Which arguments a function does not take, or lacks: the name, and what to say after "FUNCTION() ".

    Args:
        given: names of arguments.
        late: how many positional ones come from elsewhere, before them.
        besides: names of those that come from elsewhere by name.
    """
    parameters = _parameters(function)
    if parameters is None:  # written in C, without a signature
        return
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    left = [p for p in parameters if p not in positional[:late]]
    by_name = {p.name for p in left if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    more = getattr(_function(function), "known_keywords", None)
    takes_any = more is None and any(p.kind is p.VAR_KEYWORD for p in parameters)
    known = by_name | (set(more or ()) - {p.name for p in positional})
    for name in besides:
        if name not in known and not takes_any:
            yield name, f"is called with {name}=; give it that argument"
    for name in given:
        if name not in known and not takes_any:
            yield name, f"has no argument {name!r}; {nearest(name, known - set(besides))}"
    for each in left:
        if each.default is not each.empty or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            continue
        if each.kind is each.POSITIONAL_ONLY:
            yield each.name, f"takes {each.name!r} by position alone; write a function that takes it by name"
        elif each.name not in given and each.name not in besides:
            yield each.name, f"needs {each.name!r}; give it"


def _function(target: Any) -> Any:
    return target.__init__ if inspect.isclass(target) else target


def _parameters(target: Any) -> list[inspect.Parameter] | None:
    """None where there is no signature, as of what is written in C."""
    try:
        return list(inspect.signature(target, eval_str=True).parameters.values())
    except ValueError:
        return None
    except (NameError, TypeError, SyntaxError, AttributeError):  # names that only type checkers see
        pass
    try:
        found = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return None
    return [p.replace(annotation=Any) if isinstance(p.annotation, str) else p for p in found]


def _inherited(target: Any) -> dict[str, Any]:
    """Name to type of what a class with `**options` may hand on to the classes that it inherits from."""
    found: dict[str, Any] = {}
    for base in target.__mro__[1:-1] if inspect.isclass(target) else ():
        parameters = _parameters(base) or []
        for p in parameters:
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
                found.setdefault(p.name, p.annotation)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return found


def _named(target: Any, late: int) -> dict[str, inspect.Parameter]:
    """The parameters that a config may give by name, after `late` others; none without a signature."""
    parameters = _parameters(target) or []
    return {p.name: p for p in parameters[late:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _plain_defaults(named: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """The defaults that a config can hold."""
    return {name: _plain(p.default) for name, p in named.items() if _is_plain(p.default)}


def _is_plain(value: Any) -> bool:
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
    """Whether they are written alike: 1 is neither 1.0 nor true."""
    return _is_plain(value) and json.dumps(value, sort_keys=True) == json.dumps(default, sort_keys=True)


def _completed(value: Any, place: Place, at_default: list[Place]) -> Any:
    """With each call in it completed."""
    if isinstance(value, Mapping) and CALL in value:
        return Call.of(value).completed(place, at_default).tree()
    if isinstance(value, Mapping):
        return {key: _completed(each, (*place, key), at_default) for key, each in value.items()}
    if isinstance(value, list):
        return [_completed(each, (*place, at), at_default) for at, each in enumerate(value)]
    return value


def _converted(annotation: Any, value: Any, place: Place, problems: list[Problem]) -> Any:
    """A value of a config as the type asks for it."""
    if _has_calls(value):
        return _with_calls(value, place, problems)
    types_ = set(_alternatives(annotation))
    if isinstance(value, str) and ":" in value and types_ & _CALLABLES:
        return _attempt(lambda: imported(value), place, problems)
    if value is not None and any(inspect.isclass(t) and issubclass(t, Schedule) for t in types_):
        return _attempt(lambda: schedule(value), place, problems)
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
    """None where the type has one of its own, and pydantic takes no other."""
    own = typing.get_origin(annotation) is None and (
        hasattr(annotation, "__dataclass_fields__") or typing.is_typeddict(annotation)
    )
    return None if own else ConfigDict(arbitrary_types_allowed=True)


def _alternatives(annotation: Any) -> Iterator[Any]:
    """The types that it allows, without their parameters."""
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
    """A schedule of a config: {steps: 100}, {epochs: 1}, {seconds: 60}, {at: [10, 20]}, never, or a list of
    them, of which one must be due.

    Raises:
        ConfigError: it is none of these.
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
        f"{value!r} is no schedule; give {{steps: 100}}, {{epochs: 1}}, {{seconds: 60}}, {{at: [10, 20]}}, "
        "never, or a list of them"
    )


def _has_calls(value: Any) -> bool:
    if isinstance(value, Mapping):
        return CALL in value or any(map(_has_calls, value.values()))
    return isinstance(value, list) and any(map(_has_calls, value))


def _with_calls(value: Any, place: Place, problems: list[Problem]) -> Any:
    """With each call in it as `Call`."""
    if isinstance(value, Mapping) and CALL in value:
        call = _attempt(lambda: Call.of(value), place, problems)
        return None if call is None else call.checked(place, problems)
    if isinstance(value, Mapping):
        return {key: _with_calls(each, (*place, key), problems) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_calls(each, (*place, at), problems) for at, each in enumerate(value)]
    return value


def _made(value: Any) -> Any:
    """With each call in it called; the rest is copied, so that who is called twice changes nothing."""
    if isinstance(value, Call):
        return value()
    if isinstance(value, dict):
        return {key: _made(each) for key, each in value.items()}
    return [_made(each) for each in value] if isinstance(value, list) else copy.deepcopy(value)
