"""`ExperimentConfig`: the keys of an experiment's config file, with types and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from everstep import services
from everstep.errors import ConfigError, nearest
from everstep.experiment.calls import Call, checked_arguments
from everstep.experiment.config_layers import Place
from everstep.experiment.experiment import SCHEDULES, Experiment
from everstep.experiment.validation import Problem
from everstep.supervisor import InitFrom

FREE = {"free": True}
"""Mark of a field whose change touches no step of the training: shown at a resume, and used as given."""

SUPPLIED = {"supplied": 1}
"""Mark of a call whose first argument comes from elsewhere: the model's parameters, or the optimizer."""

MAIN_SERVICES = ("Best", "Checkpoints", "EarlyStop", "Evaluate")
"""Services that `everstep` itself exports; the others are in `everstep.services`."""


class ServiceCall(Call):
    """A call of a service, named by its class or by an import path: `{Evaluate: {stream: valid}}`."""

    @classmethod
    def of(cls, given: Any) -> Self:
        """Make the call from a config's value: a name, or a mapping of a name to arguments."""
        if isinstance(given, cls):
            return given
        if isinstance(given, str):
            given = {given: {}}
        if isinstance(given, Mapping) and isinstance(path := given.get("call"), str):
            others = {name: value for name, value in given.items() if name != "call"}
            raise ConfigError(
                f"{dict(given)!r} is the form of a call; a service is named by its class or import path: "
                f"give {{{path}: {others}}}"
            )
        if not isinstance(given, Mapping) or len(given) != 1:
            raise ConfigError(
                f"{given!r} is not a service; give {{Name: {{argument: value}}}}, where Name is a class of "
                "everstep or an import path, module:Name"
            )
        ((name, arguments),) = given.items()
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

    def inside(self, place: Place) -> Place:
        """Return the place of the arguments, which is below the service's name."""
        return (*place, self.name)


@dataclass
class TrainerConfig:
    """Arguments of `Trainer`, under the same names."""

    max_epoch: int | None = field(default=None, metadata=FREE)
    max_step: int | None = field(default=None, metadata=FREE)
    max_time: float | None = field(default=None, metadata=FREE)
    steps_per_epoch: int | None = None
    watch: str | tuple[str, str] | None = field(default=None, metadata=FREE)
    default_services: bool = field(default=True, metadata=FREE)
    init_from: str | dict[str, Any] | None = field(default=None, metadata=FREE)
    lock: bool = field(default=True, metadata=FREE)
    on_divergence: Literal["stop", "warn"] | None = field(default=None, metadata=FREE)


@dataclass
class ExperimentConfig:
    """Config of an experiment.

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
        name: name of the run directory below `runs/`; default: the name of the config file.
        run_dir: the run directory, instead of one below `runs/`.
        project, group: recorded, so that queries can ask for them.
        schedules: arguments of the schedules of `Experiment`, by name of the schedule.
        profiles: name to values that are laid over the config: "eval" for `everstep eval`, "predict" for
            `everstep predict`, others by `--profile`.
    """

    task: Call
    streams: dict[str, Call]
    model: Call | None = None
    optimizer: Call | None = field(default=None, metadata=SUPPLIED)
    scheduler: Call | None = field(default=None, metadata=SUPPLIED)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    services: list[ServiceCall] = field(default_factory=list, metadata=FREE)
    seed: int | None = None
    name: str | None = field(default=None, metadata=FREE)
    run_dir: str | None = field(default=None, metadata=FREE)
    project: str | None = field(default=None, metadata=FREE)
    group: str | None = field(default=None, metadata=FREE)
    schedules: dict[str, dict[str, Any]] = field(default_factory=dict, metadata=FREE)
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict, metadata=FREE)

    def mistakes(self) -> list[Problem]:
        """List mistakes that types do not show: in schedules, in `init_from`, and a missing "train"."""
        problems: list[Problem] = []
        for name, arguments in self.schedules.items():
            place: Place = ("schedules", name)
            if name in SCHEDULES:
                method = getattr(Experiment, name)
                checked_arguments(method, Call(name, arguments), place, problems, supplied=1)
            else:
                problems.append(Problem(place, f"there is no schedule {name!r}; {nearest(name, SCHEDULES)}"))
        if isinstance(source := self.trainer.init_from, dict):
            checked_arguments(InitFrom, Call("InitFrom", source), ("trainer", "init_from"), problems)
        if "train" not in self.streams:
            text = f"'train', the stream to train on, is missing; {nearest('train', self.streams)}"
            problems.append(Problem(("streams",), text))
        return problems
