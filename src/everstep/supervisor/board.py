"""The services of a run: their order, their windows, what they return, and their end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from everstep.contracts.services import (
    Action,
    Boundary,
    Moment,
    Outcome,
    RunView,
    Save,
    SaveBest,
    Service,
    ServiceFunction,
    Stage,
)
from everstep.contracts.state import Json
from everstep.errors import ConfigError, ServiceError, UsageError
from everstep.keywords import plain_tree
from everstep.metrics.collector import Collector, Reader, to_scalar
from everstep.redaction import redacted
from everstep.schedule import NEVER, Instant, Schedule, earliest
from everstep.services.checkpoints import Checkpoints
from everstep.services.console import Console
from everstep.state import isolated
from everstep.supervisor.tree import reading
from everstep.supervisor.voice import Voice

S = TypeVar("S", bound=Service)
BoundaryOf = Callable[[Service], Boundary]


class ServiceBoard:
    """Holds the services in the order in which they run.

    Args:
        collector: gives each its metric window.
        voice: says what fails.
    """

    def __init__(self, collector: Collector, voice: Voice) -> None:
        self._collector, self._voice = collector, voice
        self._services: list[Service] = []
        self._readers: dict[str, Reader] = {}
        self._opened: list[Service] = []

    def __iter__(self) -> Iterator[Service]:
        return iter(self._services)

    def add(self, service: Service) -> None:
        """Take one more service: its stage gives its place, then the order of adding.

        Raises:
            ConfigError: its name is taken, or it is no service.
        """
        require_service(service, self._services)
        self._services.append(service)
        self._services.sort(key=lambda s: (s.stage, isinstance(s, Checkpoints)))
        reader = Reader()
        if service.window != "none":
            saved = service.window == "saved" and not service.schedule.wall
            self._collector.reader(service.name, reader, saved=saved)
        self._readers[service.name] = reader

    def remove(self, service: Service) -> None:
        """Forget a service that was added while running."""
        self._services.remove(service)
        if service.window != "none":
            self._collector.drop_reader(service.name)
        del self._readers[service.name]

    def reader(self, service: Service) -> Reader:
        """The service's own metric window."""
        return self._readers[service.name]

    def all(self, kind: type[S]) -> list[S]:
        """The services of one type, in order."""
        return [service for service in self._services if isinstance(service, kind)]

    def find(self, kind: type[S]) -> S | None:
        """The first service of one type."""
        return next(iter(self.all(kind)), None)

    def need(self, kind: type[S]) -> S:
        """The first service of a type of which there is always one."""
        return self.all(kind)[0]

    def wanting(self, moment: Moment) -> list[Service]:
        """The services that asked for `moment`."""
        return [service for service in self._services if moment in service.moments]

    def open(self, run: RunView, now: float) -> None:
        """Open all, their state is restored; the console first, so that the others can speak."""
        for service in sorted(self._services, key=lambda s: not isinstance(s, Console)):
            self.open_one(service, run, now)

    def open_one(self, service: Service, run: RunView, now: float) -> None:
        """Open a service and start its clock schedule."""
        self._opened.append(service)
        service.schedule.start(now)
        with _isolated_for([service]):
            service.open(run)

    def due(self, moment: Moment, when: Instant) -> list[Service]:
        """The services to run at a boundary, in order."""
        wanting = self.wanting(moment)
        with _isolated_for(wanting):
            return [service for service in wanting if service.due(when)]

    def run(
        self, services: Sequence[Service], boundary_of: BoundaryOf, *, finish: bool = False
    ) -> list[tuple[Service | None, Action]]:
        """Run some services in order; every one runs, whatever an earlier one asked for.

        Args:
            finish: call `finish`, not `run`.

        Raises:
            Exception: what a service of a stage other than REPORT raised, after a note naming it.
        """
        actions: list[tuple[Service | None, Action]] = []
        for service in services:
            boundary = boundary_of(service)
            outcome = self._run_one(service, service.finish if finish else service.run, boundary)
            if outcome is None:
                continue
            if not isinstance(outcome, Outcome):
                raise UsageError(
                    f"service {service.name!r} returned {outcome!r}; return None or everstep.Outcome(...)"
                )
            if not isinstance(outcome.metrics, Mapping):
                raise UsageError(
                    f"service {service.name!r} returned {outcome!r}, whose metrics are no dictionary; give "
                    "what is to be done by name: everstep.Outcome(actions=(...,))"
                )
            wall = outcome.wall or service.schedule.wall or boundary.moment is Moment.AFTER_CHECKPOINT
            for name, value in outcome.metrics.items():
                value = to_scalar(name, value)
                self._collector.require_alone(f"eval/{service.name}", boundary.step, name)
                self._collector.outside(f"eval/{service.name}", boundary.step, name, value, wall=wall)
            _require_may_act(service, outcome.actions)
            actions += [(service, action) for action in outcome.actions]
        return actions

    def _run_one(self, service: Service, run: ServiceFunction, boundary: Boundary) -> Outcome | None:
        try:
            with _isolated_for([service]):
                return run(boundary)
        except Exception as error:
            if service.stage is Stage.REPORT:
                self._voice.warn(
                    f"service {service.name!r} failed and is passed over: {type(error).__name__}: {error}"
                )
                return None
            error.add_note(f"in service {service.name!r} (stage {service.stage.name})")
            raise

    def fired(self, services: Iterable[Service], when: Instant) -> None:
        """Tell the schedules of the services that ran."""
        for service in services:
            service.schedule.fired(when)

    def next_step(self, step: int) -> int:
        """The first step after `step` at which one may be due."""
        return min((s.next_step(step) for s in self._schedules()), default=NEVER)

    def next_time(self) -> float | None:
        """The clock time at which the next one becomes due."""
        return earliest(s.next_time() for s in self._schedules())

    def _schedules(self) -> list[Schedule]:
        return [s.schedule for s in self.wanting(Moment.AFTER_STEP)]

    def controllers(self) -> dict[str, Json]:
        """Name and configuration of each controller that has one, for comparison on resume."""
        told = {s.name: s.config() for s in self._services if s.controller and s.config() is not None}
        shown: dict[str, Json] = redacted(plain_tree(told))
        return shown

    def state(self) -> dict[str, Any]:
        """The `services/` branch: the state of each that has one."""
        with _isolated_for(self._services):
            states = {s.name: s.state_dict() for s in self._services}
        return {name: {"version": 1, "state": state} for name, state in states.items() if state is not None}

    def load(self, saved: dict[str, Any], where: object) -> None:
        """Give each its saved state; one line for each that was added or dropped.

        Raises:
            RestoreError: one cannot use its state; names that, and `where` it is saved.
        """
        known = {s.name: s for s in self._services}
        for name, service in known.items():
            if name in saved:
                with reading(where, f"services/{name}"):
                    service.load_state_dict(saved[name]["state"])
            elif service.state_dict() is not None:
                self._voice.say(f"service {name!r} is new in this run: it starts fresh")
        for name in saved:
            if name not in known:
                self._voice.say(f"service {name!r} is gone: its state is dropped")

    def close(self) -> None:
        """Close all that were opened, in reverse; every one is closed.

        Raises:
            ServiceError: one or more failed; all are listed.
        """
        errors: list[tuple[str, BaseException]] = []
        while self._opened:
            service = self._opened.pop()
            try:
                service.close()
            except Exception as error:
                errors.append((service.name, error))
        if errors:
            lines = "; ".join(f"{name!r}: {type(e).__name__}: {e}" for name, e in errors)
            raise ServiceError(f"closing failed for {len(errors)} service(s): {lines}") from errors[0][1]


def require_service(service: Service, others: Iterable[Service]) -> None:
    """Refuse what is not a service, and a name that one of the others has.

    Raises:
        ConfigError: says which.
    """
    if not isinstance(service, Service):
        raise ConfigError(
            f"{service!r} is no Service; pass instances, such as everstep.EarlyStop(...), "
            "or register a function with loop.on(moment, fn)"
        )
    if service.name == "metrics":
        raise ConfigError("the service name 'metrics' is taken by the metric windows; give another name=")
    if any(other.name == service.name for other in others):
        raise ConfigError(
            f"two services are named {service.name!r}; names are the keys of their state: "
            "give one of them name="
        )


def _isolated_for(services: Iterable[Service]) -> AbstractContextManager[None]:
    """Whatever services of the user's own draw, whenever they are called, training draws the same."""
    return isolated() if any(service.isolate for service in services) else nullcontext()


def _require_may_act(service: Service, actions: Sequence[Action]) -> None:
    """Decisions fall up to DECIDE, and who takes them says so; SAVE only adds what to save.

    Raises:
        UsageError: names the service and what it asked for.
    """
    if service.stage is Stage.SAVE:
        actions = [action for action in actions if not isinstance(action, Save | SaveBest)]
    elif service.stage is not Stage.REPORT and service.controller:
        return
    if actions:
        kind = "a controller" if service.controller else "an observer"
        raise UsageError(
            f"service {service.name!r} ({kind} of stage {service.stage.name}) asked for {actions[0]}; "
            "to act, give its class controller = True and stage = Stage.DECIDE or an earlier one"
        )
