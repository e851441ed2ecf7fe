"""Typed configuration: a dataclass is the schema, YAML files and overrides are laid over its defaults.

@dataclass
class Config:
    optimizer: Call
    width: int = 64

resolved = resolve(Config, ["base.yaml", "wide.yaml"], ["width=128"])
resolved.config.width
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError

from everstep.errors import ConfigError, nearest
from everstep.experiment.calls import Call
from everstep.experiment.config_layers import Layers, Place, as_yaml, dotted, layered
from everstep.experiment.validation import Problem, kind_of, members, told, validated

T = TypeVar("T")

__all__ = ["Call", "Resolved", "as_yaml", "resolve"]


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """Config after all layers are laid and every default is filled in.

    Attributes:
        config: an object of the schema.
        tree: the config as JSON values, with every default, also the plain ones in the signatures of calls;
            `resolve` makes the same config from it.
        defaults: dotted paths of the arguments of calls that equal their defaults.
    """

    config: T
    tree: dict[str, Any]
    defaults: tuple[str, ...] = ()


@typing.runtime_checkable
class HasMistakes(typing.Protocol):
    """Schema that looks for mistakes by itself, once every value has its type."""

    def mistakes(self) -> list[Problem]: ...


def resolve(
    schema: type[T],
    files: Iterable[str | Path] = (),
    overrides: Iterable[str] = (),
    *,
    base: Mapping[str, Any] | None = None,
    profile: str | None = None,
    imports: bool = True,
) -> Resolved[T]:
    """Lay files over the schema's defaults, and overrides over the files.

    Args:
        schema: a dataclass; its fields may be dataclasses, lists and dictionaries of them, and `Call`.  Its
            method `mistakes`, if there is one, lists what the types cannot tell.
        files: YAML; a later file wins over an earlier one.  Mappings are merged, lists replaced.
        overrides: PATH=VALUE each, VALUE in YAML: "optimizer.lr=1e-3", "layers=[64, 64]", "layers.0=32".
        base: `tree` of another config, laid below the files.
        profile: name under the key `profiles`; its values are laid over all the rest.
        imports: False to import nothing that is called: arguments are neither checked nor completed.

    Raises:
        ConfigError: lists every mistake with its place: file and line, key, value.
    """
    layers = layered(files, overrides)
    if base is not None:
        below = Layers(dict(base), {(): "the stored config"})
        below.lay(layers)
        layers = below
    if profile is not None:
        layers = _with_profile(layers, profile)
    problems: list[Problem] = []
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(schema)
        config = validated(adapter, layers.tree, schema, (), problems)
        if isinstance(config, HasMistakes):
            problems += config.mistakes()
    except (PydanticUserError, PydanticUndefinedAnnotation) as error:
        what = str(error).partition("\n")[0]
        raise ConfigError(
            f"{schema!r} is not a schema: {what}; give a dataclass whose types are those of JSON, "
            "dataclasses and Call, in a module that imports them at run time"
        ) from error
    # A wrong config is searched as written, so that mistakes in its calls are listed, too.
    tree = layers.tree if config is None else adapter.dump_python(config, mode="json")
    called = list(calls(schema, tree)) if imports else []
    for place, call, supplied in called:
        call.checked(place, problems, supplied)
    if problems:
        raise ConfigError(told(problems, layers.origin))
    at_default = list[Place]()
    for place, call, supplied in called:
        *above, last = place
        reduce(getitem, above, tree)[last] = call.completed(place, at_default, supplied)
    # Validated a second time, so that `config` holds the completed calls.
    config = adapter.validate_python(tree)
    tree = adapter.dump_python(config, mode="json")
    return Resolved(config, tree, tuple(map(dotted, at_default)))


def _with_profile(layers: Layers, name: str) -> Layers:
    found = _mapping(layers, ("profiles",), layers.tree.get("profiles") or {})
    if name not in found:
        raise ConfigError(f"the config has no profile {name!r}; {nearest(name, found)}")
    place = ("profiles", name)
    _mapping(layers, place, found[name])
    origins = {p[2:]: o for p, o in layers.origins.items() if p[:2] == place}
    layers.lay(Layers(found[name], origins))
    return layers


def _mapping(layers: Layers, place: Place, value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    what = "there is no value" if value is None else f"{value!r} is {kind_of(value)}"
    text = f"{what}; give a mapping of keys to values"
    raise ConfigError(told([Problem(place, text)], layers.origin))


def calls(schema: Any, tree: Any, place: Place = (), supplied: int = 0) -> Iterator[tuple[Place, Call, int]]:
    """Yield each call in a tree where a schema has one: its place, the call, how many arguments are supplied.

    Supplied arguments are positional ones that come from elsewhere.  What does not fit the schema is passed
    over.
    """
    for each in members(schema):
        inner = typing.get_args(each)
        if inspect.isclass(each) and issubclass(each, Call):
            # Validation has listed a value that is not a call.
            with suppress(ConfigError):
                yield place, each.of(tree), supplied
        elif dataclasses.is_dataclass(each) and isinstance(tree, Mapping):
            hints = typing.get_type_hints(each)
            for one in dataclasses.fields(each):
                found = tree.get(one.name)
                yield from calls(hints[one.name], found, (*place, one.name), one.metadata.get("supplied", 0))
        elif isinstance(tree, Mapping) and len(inner) == 2:
            for key, value in tree.items():
                yield from calls(inner[1], value, (*place, key), supplied)
        elif isinstance(tree, list) and inner:
            for at, value in enumerate(tree):
                yield from calls(inner[0], value, (*place, at), supplied)


def free(schema: Any, place: Place = ()) -> list[str]:
    """Dotted paths of the fields that are marked as touching no step of the training."""
    hints = typing.get_type_hints(schema)
    found = []
    for each in dataclasses.fields(schema):
        if each.metadata.get("free"):
            found.append(dotted((*place, each.name)))
        elif dataclasses.is_dataclass(hints[each.name]):
            found += free(hints[each.name], (*place, each.name))
    return found
