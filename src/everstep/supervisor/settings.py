"""Options of a run: their names and types once for all doors, their checks, and what drives the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict

from everstep.arguments import flag, integer, number, plain
from everstep.contracts.data import Share, Uneven
from everstep.contracts.services import Clock, Moment, Service
from everstep.data.adapt import named
from everstep.errors import ConfigError
from everstep.metrics import MetricFormatter
from everstep.record import located, user_path
from everstep.schedule import Every, Schedule
from everstep.services.best import Best
from everstep.services.checkpoints import Checkpoints, Index, JournalFlush
from everstep.services.console import Console
from everstep.services.judges import NaNGuard, StopAfter
from everstep.services.recovery import HangWatch, Recovery, Retry
from everstep.services.replayed import plan_of_process
from everstep.supervisor.board import find_service, require_service
from everstep.supervisor.checks.verification import OnDivergence
from everstep.supervisor.data_ranks import read_data_ranks
from everstep.supervisor.opening.configuration import Configuration
from everstep.supervisor.opening.init_from import InitFrom
from everstep.supervisor.saving.state_tree import Limits
from everstep.supervisor.saving.user_state import UserState
from everstep.unattended import seed_or_drilled

_ONE_EACH: dict[type[Service], str] = {
    HangWatch: "give the seconds that you mean",
    Checkpoints: "it takes both schedules and all rules, as in "
    "Checkpoints(Every(epochs=1) | Every(steps=500), keep_last=3, keep_every=Every(epochs=10))",
}


@dataclass(frozen=True)
class LoopKind:
    """Kind of loop that drives a run: the name of its class, and the moments that come in it."""

    name: str
    moments: frozenset[Moment]
    same_data: bool = False
    """Whether a rollback resumes in this process, with the same data."""

    def require(self, moments: Iterable[Moment], who: str, every: Schedule | None = None) -> None:
        moments = frozenset(moments)
        missing = moments - self.moments
        if Moment.AFTER_STEP in moments:
            missing -= {Moment.AFTER_EPOCH}  # its schedule says which of the two
            if Moment.AFTER_EPOCH not in self.moments and isinstance(every, Every) and every.epochs:
                raise ConfigError(
                    f"{who} is due Every(epochs={every.epochs}), and a {self.name} has no epochs; "
                    "give every=Every(steps=...), or take a TrainLoop"
                )
        for moment in sorted(missing, key=lambda each: each.value):
            other = "a Trainer" if moment is Moment.AFTER_EVAL_STEP else "a TrainLoop or a Trainer"
            raise ConfigError(
                f"{who} asks for {moment.name}, which a {self.name} does not have; take {other}"
            )


class LoopDriver(Protocol):
    """Drives the engine's steps, and answers its questions; the engine asks nothing else of a loop."""

    def tag(self) -> str:
        """Tag at the beginning of a line, with the place of the run."""

    def get_progress(self) -> float | None:
        """The part of the run that is done, 0 to 1; None if it is unbounded."""

    def data_wait(self) -> float:
        """Seconds that this start has waited for batches."""

    def batches(self) -> tuple[int, int]:
        """Numbers of batches in this start: drawn by the program itself, and used in complete steps."""
        return 0, 0

    def remaining_steps(self) -> int | None:
        """Number of steps until the open step loop ends; None if unknown."""
        return None

    def reads_on(self) -> bool:
        """Whether the next step reads a stream, whose place is saved; False where none is known to follow."""
        return False

    def is_partial(self) -> bool:
        """Whether the epoch that is being closed was cut short inside a pass."""
        return False

    def check_epoch(self) -> None:
        """Raise an error if an epoch did not make sense; asked at its end, before its save."""
        return None

    def finish(self) -> bool:
        """Complete what is open at a clean end; return whether the program reached the loop's own end."""
        return True


class RunOptions(TypedDict, total=False):
    """Options that every door takes as keywords; `Supervisor` describes them."""

    seed: int | None
    max_step: int | None
    max_time: float | None
    resume: bool | int | str | Path
    init_from: str | Path | InitFrom | None
    init_fn: Callable[[], object] | None
    local_init_fn: Callable[[], object] | None
    ready: Callable[[], object] | None
    default_services: bool
    on_change: Literal["error", "override"]
    on_divergence: OnDivergence
    config: Mapping[str, Any] | Configuration | None
    config_free: Iterable[str]
    lock: bool
    uneven: Uneven | None
    data_ranks: Any
    clock: Clock


class LoopOptions(RunOptions, total=False):
    """Options of a loop with epochs; `TrainLoop` describes those that are added."""

    max_epoch: int | None
    steps_per_epoch: int | None
    watch: str | tuple[str, str] | None
    groups: Sequence[str]
    formatter: MetricFormatter | None
    show_eta: bool


class Settings:
    """Checked arguments of a start, without its state; `services` has those that every run has, too."""

    def __init__(
        self,
        kind: LoopKind,
        run_dir: str | Path,
        services: Iterable[Service],
        streams: Mapping[str, Any] | None,
        options: RunOptions,
        max_epoch: int | None = None,
    ) -> None:
        self.kind, self.clock = kind, options.get("clock", time.monotonic)
        self.path = located(user_path(run_dir, "run_dir")).absolute()  # the program may change its folder
        self.limits = Limits(
            integer("max_step", options.get("max_step"), none="for no limit"),
            integer("max_epoch", max_epoch, none="for no limit"),
        )
        self.seed = seed_or_drilled(integer("seed", options.get("seed"), 0, none="to draw one"))
        max_time = number("max_time", options.get("max_time"), of="seconds", none="for no limit")
        self.replay = plan_of_process()
        resume = plain(options.get("resume", True))
        if not isinstance(resume, bool | int | str | Path):
            raise ConfigError(f"resume={resume!r}: give True, False, a step, a checkpoint's name or a path")
        # the copy of a run has the checkpoint that is meant, and its mirror is the run's own
        self.resume = resume if self.replay is None else True
        self.on_change = options.get("on_change", "error")
        if self.on_change not in ("error", "override"):
            raise ConfigError(f'on_change={self.on_change!r}: give "error" or "override"')
        self.on_divergence = options.get("on_divergence")
        if self.on_divergence not in ("stop", "warn", None):
            raise ConfigError(
                f'on_divergence={self.on_divergence!r}: give "stop" or "warn", or leave it out: then other '
                "batches stop the run, and other numbers are a warning"
            )
        self.init_from = InitFrom.of(options.get("init_from"))
        self.init_fn, self.local_init_fn = options.get("init_fn"), options.get("local_init_fn")
        self.ready, self.lock = options.get("ready"), flag("lock", options.get("lock", True))
        self.config = Configuration.of(options.get("config"), options.get("config_free", ()))
        self.uneven = Share(uneven=options.get("uneven")).uneven
        self.data_ranks = read_data_ranks(options.get("data_ranks"))
        self.streams = {} if streams is None else named(streams)
        defaults = options.get("default_services", True)
        self.services: Sequence[Service] = _with_defaults(service_list(services), defaults, max_time)
        self.checkpoints = find_service(Checkpoints, self.services) or Checkpoints()
        self.recovery, self.retry = find_service(Recovery, self.services), find_service(Retry, self.services)
        self.hang_watch = find_service(HangWatch, self.services)
        self.console = find_service(Console, self.services)
        self.mirror = self.checkpoints.mirror if self.replay is None else None
        for index, service in enumerate(self.services):
            require_service(service, self.services[:index])
            kind.require(service.moments, f"service {service.name!r}", service.schedule)

    def state(self, objects: Mapping[str, Any] | Sequence[tuple[str, Any]] | None) -> UserState:
        """Make the state of a `state=` argument, and check the entries that services name."""
        user = UserState(objects)
        for service in self.services:
            if isinstance(service, Best):
                user.require_entries(f"restore_at_end= of {service.name!r}", service.part or ())
        return user


def service_list(services: Iterable[Service]) -> list[Service]:
    if not isinstance(services, Iterable) or isinstance(services, type):
        raise ConfigError(
            f"services={services!r} is not a list; give a list, as in services=[everstep.Best(...)]"
        )
    return list(services)


def _with_defaults(services: list[Service], defaults: bool, max_time: float | None) -> list[Service]:
    if sum(isinstance(service, Best) and service.restore_at_end for service in services) > 1:
        raise ConfigError("two Best services have restore_at_end=True; give it to one of them")
    for kind, remedy in _ONE_EACH.items():
        if sum(isinstance(service, kind) for service in services) > 1:
            raise ConfigError(f"two {kind.__name__} services: a run has one; {remedy}")
    if max_time is not None:
        services.append(StopAfter(seconds=max_time, name="max_time"))
    if defaults:
        services += [
            kind() for kind in (NaNGuard, Console, HangWatch) if find_service(kind, services) is None
        ]
    services += [kind() for kind in (Checkpoints, Index) if find_service(kind, services) is None]
    services.append(JournalFlush())
    return services
