"""Typed configuration: a dataclass is the schema, YAML files and overrides are laid over its defaults."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import AfterValidator, TypeAdapter
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError

from everstep import services
from everstep.contracts.data import Uneven
from everstep.errors import ConfigError, nearest
from everstep.experiment.calls import Call, CallWith
from everstep.experiment.config_layers import Layers, Place, as_yaml, dotted, layered
from everstep.experiment.experiment import require_schedule
from everstep.experiment.validation import ConfigMistakes, validated

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
            if name not in homes:
                raise ConfigError(f"no service {name!r}; {nearest(name, homes)}")
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
