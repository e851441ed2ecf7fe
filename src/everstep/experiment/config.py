"""Typed configuration: a dataclass is the schema, YAML files and overrides are laid over its defaults."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import AfterValidator, TypeAdapter
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.scalarbool import ScalarBoolean

from everstep import services
from everstep.contracts.data import Uneven
from everstep.contracts.services import Service
from everstep.errors import ConfigError, alike, nearest
from everstep.experiment.calls import Call, CallWith, ConfigMistakes, Place, dotted, validated
from everstep.experiment.experiment import require_schedule
from everstep.experiment.import_paths import CALL, imported

FREE = (
    *("services", "name", "run_dir", "project", "group", "schedules", "profiles"),
    *("trainer.max_epoch", "trainer.max_step", "trainer.max_time", "trainer.watch", "trainer.lock"),
    *("trainer.default_services", "trainer.init_from", "trainer.on_divergence"),
    *("trainer.groups", "trainer.show_eta"),
)
"""Keys whose change touches no step of the training: shown at a resume, and used as given."""

MAIN_SERVICES = ("Best", "Checkpoints", "EarlyStop", "Evaluate")
"""Services that `everstep` itself exports; the others are in `everstep.services`."""


class ServiceCall(Call):
    """A call of a service, named by its class or by an import path: `{Evaluate: {stream: valid}}`."""

    @classmethod
    def of(cls, value: Any) -> Self:
        """Make the call from a config's value: a name, or a mapping of a name to arguments."""
        if isinstance(value, str):
            value = {value: {}}
        if not isinstance(value, Mapping) or len(value) != 1:
            raise ConfigError(
                f"{value!r} is not a service; give {{Name: {{argument: value}}}}, with a class or module:Name"
            )
        ((name, arguments),) = value.items()
        if not isinstance(arguments, Mapping | None):
            raise ConfigError(f"the service {name} has {arguments!r}; give {{argument: value}}")
        if ":" not in name:
            homes = dict.fromkeys(services.__all__, "everstep.services")
            homes |= dict.fromkeys(MAIN_SERVICES, "everstep")
            kinds = {each: imported(f"{homes[each]}:{each}") for each in ([name] if name in homes else homes)}
            known = [
                each for each, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Service)
            ]
            if name not in known:
                raise ConfigError(f"no service {name!r}; {nearest(name, known)}")
            name = f"{homes[name]}:{name}"
        return cls(name, arguments or {})

    @property
    def name(self) -> str:
        """Name of the service as the config writes it."""
        return self.call.removeprefix("everstep.services:").removeprefix("everstep:")

    def tree(self) -> dict[str, Any]:
        """Return the mapping that `of` takes."""
        return {self.name: dict(self.arguments)}

    def inside(self) -> Place:
        """Return the place of the arguments, which is below the service's name."""
        return (self.name,)


@dataclass
class TrainerConfig:
    """Arguments of `Trainer`, under the same names.

    Left out is what a file cannot say (functions, a mesh), what has its key elsewhere (`seed`), and what is
    chosen for one start, while a run keeps its config for all (`resume`, `on_change`).
    """

    max_epoch: int | None = None
    max_step: int | None = None
    max_time: float | None = None
    steps_per_epoch: int | None = None
    watch: str | tuple[str, str] | None = None
    default_services: bool = True
    init_from: str | dict[str, Any] | None = None
    lock: bool = True
    on_divergence: Literal["stop", "warn"] | None = None
    uneven: Uneven | None = None
    data_ranks: Literal[1] | None = None
    groups: list[str] | None = None
    show_eta: bool = True


def _with_train(streams: dict[str, Call]) -> dict[str, Call]:
    if "train" not in streams:
        raise ConfigError(f"'train', the stream to train on, is missing; {nearest('train', streams)}")
    return streams


def _known(schedules: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    for name in schedules:
        require_schedule(name)
    return schedules


@dataclass
class ExperimentConfig:
    """Config of an experiment; docs/guide/experiment.md has all keys.

    Attributes:
        task: makes the `Task`: its class, or a function.
        streams: name to the call that makes the data; "train" is the stream to train on.
        model: makes the model, instead of the task's `build_model`.
        optimizer: called with the model's parameters (with the model, if it has no `parameters()`),
            instead of `build_optimizer`.
        scheduler: called with the optimizer, instead of `build_scheduler`.
        trainer: arguments of `Trainer`, such as limits.
        services: evaluation, early stop, checkpoints ...; a resume compares the controllers among them.
        seed: seed of the run.
        project, group: recorded, so that queries can ask for them.
        name: name of the run directory below `runs/`; default: the name of the config file.
        schedules: arguments of the schedules of `Experiment`, by name of the schedule.
        profiles: name to values that are laid over the config: "eval" for `everstep eval`, "predict" for
            `everstep predict`, others by `--profile`.
    """

    task: Call
    streams: Annotated[dict[str, Call], AfterValidator(_with_train)]
    model: Call | None = None
    optimizer: CallWith | None = None
    scheduler: CallWith | None = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    services: list[ServiceCall] = field(default_factory=list)
    seed: int | None = None
    name: str | None = None
    run_dir: str | None = None
    project: str | None = None
    group: str | None = None
    schedules: Annotated[dict[str, dict[str, Any]], AfterValidator(_known)] = field(default_factory=dict)
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)


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
    except ConfigMistakes as error:
        raise ConfigMistakes(error.mistakes, layers.origin) from None
    except (PydanticUserError, PydanticUndefinedAnnotation) as error:
        problem = str(error).partition("\n")[0]
        raise ConfigError(
            f"{schema!r} is not a schema: {problem}; give a dataclass whose types are imported at run time"
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


# ------------------------------------------------------------------------- layers of a config

MOST_VALUES = 100_000
"""Most values of a file or override, each alias counted in full: nine lines may stand for a billion."""


@dataclass
class Layers:
    """A tree of JSON values, with the origin of each: place to "FILE, line N", or to the override."""

    tree: Any = field(default_factory=dict)
    origins: dict[Place, str] = field(default_factory=dict)

    def origin(self, place: Place) -> str:
        """Return the origin of the value at a place, or of the nearest value around it; "" without either."""
        around = (place[:end] for end in range(len(place), -1, -1))
        return next((self.origins[each] for each in around if each in self.origins), "")

    def lay(self, other: Layers) -> None:
        """Lay another tree over this one: mappings are merged key by key, other values replaced.

        A mapping with another `call` replaces the whole mapping: the old arguments were for another function.
        """
        self.tree = _merge(self.tree, other.tree)
        self.origins |= other.origins  # origins of values that are gone are never asked for

    def override(self, text: str) -> None:
        """Replace the value that "PATH=VALUE" names; PATH may have indices of lists."""
        origin = f"override {text!r}"
        keys, value = assignment(text, origin)
        self.tree = self._replace(self.tree, (), keys, value, origin)

    def _replace(self, old: Any, place: Place, keys: Sequence[str], new: Layers, origin: str) -> Any:
        if place:
            self.origins.setdefault(place, origin)
        if not keys:
            self.origins |= {(*place, *inside): origin for inside in new.origins}
            return new.tree
        key, *rest = keys
        if isinstance(old, list) and key.lstrip("-").isdecimal():
            if not key.isdecimal() or (at := int(key)) >= len(old):
                entries = f"{dotted(place)} has {len(old)} entries, but no entry {key}"
                numbers = f"a number from 0 to {len(old) - 1}" if old else "the whole list"
                raise ConfigError(f"{origin}: {entries}; give {numbers}")
            return [*old[:at], self._replace(old[at], (*place, at), rest, new, origin), *old[at + 1 :]]
        old = old if isinstance(old, Mapping) else {}
        if key == CALL and not rest and old.get(CALL) != new.tree:
            old = {}  # arguments of another function
        return {**old, key: self._replace(old.get(key), (*place, key), rest, new, origin)}


def _merge(old: Any, new: Any) -> Any:
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    if CALL in new and old.get(CALL) != new[CALL]:
        return new
    return {**old, **{key: _merge(old.get(key), value) for key, value in new.items()}}


def layered(files: Iterable[str | Path], overrides: Iterable[str] = (), base: Any = None) -> Layers:
    """Lay files over `base`, later over earlier, and over all files the overrides, "PATH=VALUE" each."""
    layers = Layers() if base is None else Layers(base, {(): "the stored config"})
    for file in map(Path, files):
        if file.suffix == ".py":
            raise ConfigError(
                f"{file} is a Python script, and this command takes a config: give a YAML file that names "
                "your task (docs/guide/experiment.md); a script is started by python, or by everstep run"
            )
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            known = [str(each) for end in ("yaml", "yml") for each in file.parent.glob(f"*.{end}")]
            hint = alike(str(file), known) if isinstance(error, FileNotFoundError) else ""
            raise ConfigError(f"{file} cannot be read ({error}); {hint}give a YAML file") from error
        layer = parsed(text, str(file))
        if not isinstance(layer.tree, dict | None):
            raise ConfigError(f"{file} holds {layer.tree!r}; give keys and values, as in  seed: 7")
        if layer.tree is not None:
            layers.lay(layer)
    for override in overrides:
        layers.override(override)
    return layers


def assignment(text: str, name: str) -> tuple[tuple[str, ...], Layers]:
    """Split "PATH=VALUE" into keys and value."""
    path, equals, value = text.partition("=")
    keys = tuple(path.strip().split("."))
    if not equals or not all(keys):
        raise ConfigError(f"{text!r} is not an override; give PATH=VALUE, as in optimizer.lr=0.1")
    if not value.strip():
        raise ConfigError(f"{name}: the value is missing; give null for none, '\"\"' for an empty string")
    return keys, parsed(value, name)


def parsed(text: str, name: str) -> Layers:
    """Read a YAML string (YAML 1.2: 1e-3 is a number, and `on` is a string)."""
    layers = Layers()
    try:
        layers.tree = _plain(YAML(typ="rt", pure=True).load(StringIO(text)), (), 1, name, layers.origins)
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply; give fewer levels") from None
    except (YAMLError, ValueError) as error:  # ValueError: a number of more digits than Python reads
        place, problem = name, str(error)
        if isinstance(error, MarkedYAMLError):
            place += "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
            problem = (error.problem or "this is not YAML").partition(" with value")[0]
        raise ConfigError(f"{place}: {problem}; correct the YAML there") from None
    return layers


def _plain(value: Any, place: Place, line: int, name: str, origins: dict[Place, str]) -> Any:
    """Convert a loaded value to plain Python types, and note the origin of each part."""
    origin = origins[place] = f"{name}, line {line}"
    if len(origins) > MOST_VALUES:
        raise ConfigError(
            f"{origin}: there are more than {MOST_VALUES:,} values, with each alias written out; give fewer"
        )
    # Keys that a merge (<<) brought have no line of their own.
    lines = getattr(getattr(value, "lc", None), "data", None) or {}

    def inside(key: Any, part: Any) -> Any:
        return _plain(part, (*place, key), lines[key][0] + 1 if key in lines else line, name, origins)

    if isinstance(value, list):
        return [inside(at, part) for at, part in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{origin}: the key {key!r} is not a string; put it in quotes")
        return {str(key): inside(key, part) for key, part in value.items()}
    origin += f": {dotted(place)}" if place else ""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{origin}: {value} is not a number of JSON; give null, or a finite number")
    for kind, kinds in _KINDS.items():
        if isinstance(value, kinds):
            return kind(value)
    if value is None:
        return None
    raise ConfigError(f"{origin}: {str(value)[:80]} is a {type(value).__name__}; give a value of JSON")


_KINDS: dict[type, Any] = {bool: bool | ScalarBoolean, int: int, float: float, str: str | datetime.date}
"""Plain types -> the loader's; a bool is an int, too, so it comes first."""


def as_yaml(tree: Any) -> str:
    """Write `tree` (mappings, lists, strings, numbers, booleans, None) as YAML that reads back as it."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.width = 100
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    stream = StringIO()
    yaml.dump(tree, stream)
    return stream.getvalue()
