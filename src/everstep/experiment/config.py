"""Typed configuration: a dataclass is the schema, YAML files and overrides are laid over its defaults."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError

from everstep.errors import ConfigError, nearest
from everstep.experiment.calls import Call
from everstep.experiment.config_layers import Layers, Place, as_yaml, dotted, layered
from everstep.experiment.validation import Mistakes, validated

T = TypeVar("T")

__all__ = ["Call", "Resolved", "as_yaml", "resolve"]


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """Config after all layers are laid and every default is filled in.

    Attributes:
        config: an object of the schema.
        tree: the config as JSON values, from which `resolve` makes the same config.
        defaults: dotted paths of the arguments of calls that equal their defaults.
    """

    config: T
    tree: dict[str, Any]
    defaults: tuple[str, ...] = ()


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
        schema: a dataclass; its fields may be dataclasses, lists and dictionaries of them, and `Call`.
        files: YAML; a later file wins over an earlier one.  Mappings are merged, lists replaced.
        overrides: PATH=VALUE each, VALUE in YAML: "optimizer.lr=1e-3", "layers=[64, 64]", "layers.0=32".
        base: `tree` of another config, laid below the files.
        profile: name under the key `profiles`; its values are laid over all the rest.
        imports: False to import nothing that is called: arguments are neither checked nor completed.
    """
    layers = layered(files, overrides, copy.deepcopy(base))
    profiles = layers.tree.get("profiles", {})
    # The validation tells what is no mapping, with its place.
    if profile is not None and isinstance(profiles, Mapping):
        if profile not in profiles:
            raise ConfigError(f"the config has no profile {profile!r}; {nearest(profile, profiles)}")
        if isinstance(values := profiles[profile], Mapping):
            origins = {p[2:]: o for p, o in layers.origins.items() if p[:2] == ("profiles", profile)}
            layers.lay(Layers(values, origins))
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(schema)
        config = validated(adapter, layers.tree, schema, {"imports": imports})
    except Mistakes as mistakes:
        raise Mistakes(mistakes.problems, layers.origin) from None
    except (PydanticUserError, PydanticUndefinedAnnotation) as error:
        what = str(error).partition("\n")[0]
        raise ConfigError(
            f"{schema!r} is not a schema: {what}; give a dataclass whose types are those of JSON, "
            "dataclasses and Call, in a module that imports them at run time"
        ) from error
    at_default = [dotted((*place, *each)) for place, call in _calls(config) for each in call.at_default]
    return Resolved(config, adapter.dump_python(config, mode="json"), tuple(at_default))


def _calls(value: Any, place: Place = ()) -> Iterator[tuple[Place, Call]]:
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Call):
        yield place, value
    elif dataclasses.is_dataclass(value):
        parts = ((each.name, getattr(value, each.name)) for each in dataclasses.fields(value))
    elif isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    for key, part in parts:
        yield from _calls(part, (*place, key))
