"""`ExperimentConfig`: what a config file of an experiment may say, with types and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from everstep import services
from everstep.errors import ConfigError, nearest
from everstep.experiment.calls import Call, checked_arguments
from everstep.experiment.experiment import SCHEDULES, Experiment
from everstep.experiment.layers import Place, dotted
from everstep.experiment.mistakes import Problem

FREE = {"free": True}
"""Marks a field whose change touches no step of the training: shown at a resume, and used as given."""

LATE = {"late": 1}
"""Marks a call whose first argument is not the config's: the model's parameters, the optimizer."""

MAIN_SERVICES = (
    "Best",
    "Checkpoints",
    "Console",
    "EarlyStop",
    "Evaluate",
    "NaNGuard",
    "Recovery",
    "StopAfter",
)
"""The services that `everstep` itself exports; the others are in `everstep.services`."""


class ServiceCall(Call):
    """A service: `{Evaluate: {stream: valid}}`, by its name or by import path."""

    @classmethod
    def of(cls, given: Any) -> Self:
        """From what a config has: a name, or a name with its arguments.

        Raises:
            ConfigError: no such service.
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, str):
            given = {given: {}}
        if not isinstance(given, Mapping) or len(given) != 1:
            raise ConfigError(f"{given!r} is no service; give {{Name: {{argument: value}}}}")
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
        """As the config has it."""
        return self.call.removeprefix("everstep.services:").removeprefix("everstep:")

    def tree(self) -> dict[str, Any]:
        """As `of` takes it."""
        return {self.name: dict(self.arguments)}

    def inside(self, place: Place) -> Place:
        """Where its arguments stand: below its name."""
        return (*place, self.name)


@dataclass
class TrainerConfig:
    """Arguments of `Trainer`, by the same names."""

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
    """What an experiment is.

    Attributes:
        task: makes the `Task`: its class, or a function.
        streams: name to what makes the data; "train" is trained on.
        model: makes the model, instead of the task's `build_model`.
        optimizer: called with the model's parameters (with the model, if it has no `parameters()`),
            instead of `build_optimizer`.
        scheduler: called with the optimizer, instead of `build_scheduler`.
        trainer: limits and the like.
        services: evaluation, early stop, checkpoints ...; those that control training are compared by
            themselves at a resume.
        seed: of the run.
        name: of the run directory below `runs/`; default: that of the config file.
        run_dir: the run directory, instead.
        project, group: recorded, to ask for.
        schedules: arguments of the schedules of `Experiment`, by name of the schedule.
        profiles: name to what is laid over the config for it: "eval" for `everstep eval`, "predict" for
            `everstep predict`, others by `--profile`.
    """

    task: Call
    streams: dict[str, Call]
    model: Call | None = None
    optimizer: Call | None = field(default=None, metadata=LATE)
    scheduler: Call | None = field(default=None, metadata=LATE)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    services: list[ServiceCall] = field(default_factory=list, metadata=FREE)
    seed: int | None = None
    name: str | None = field(default=None, metadata=FREE)
    run_dir: str | None = field(default=None, metadata=FREE)
    project: str | None = field(default=None, metadata=FREE)
    group: str | None = field(default=None, metadata=FREE)
    schedules: dict[str, dict[str, Any]] = field(default_factory=dict, metadata=FREE)
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict, metadata=FREE)

    def __post_init__(self) -> None:
        problems: list[Problem] = []
        for name, arguments in self.schedules.items():
            if name not in SCHEDULES:
                raise ConfigError(f"schedules has {name!r}, which is none; {nearest(name, SCHEDULES)}")
            method = getattr(Experiment, name)
            checked_arguments(method, Call(name, arguments), ("schedules", name), problems, late=1)
        if problems:
            raise ConfigError("; ".join(f"{dotted(place)}: {text}" for place, text in problems))
        if "train" not in self.streams:
            raise ConfigError(
                f"streams has no 'train', which is trained on; {nearest('train', self.streams)}"
            )
