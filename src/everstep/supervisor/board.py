"""Services of a run: their order and windows, what each gets and returns, and its end."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from everstep.arguments import plain
from everstep.contracts.services import (
    OBSERVED,
    SCHEDULED,
    SYNCHRONOUS,
    Action,
    Boundary,
    Moment,
    Outcome,
    RunView,
    Save,
    SaveBest,
    Service,
    ServiceFunction,
    SetValue,
    Stage,
)
from everstep.contracts.state import Json
from everstep.display.cells import with_leaves
from everstep.errors import ConfigError, ServiceError, UsageError
from everstep.metrics.collector import Collector, Reader, is_scalar, to_scalar
from everstep.redaction import redacted
from everstep.schedule import NEVER, Instant, Schedule, Unscheduled, earliest
from everstep.services.best import Best
from everstep.services.console import Voice
from everstep.services.judges import Conditional
from everstep.state import isolated
from everstep.supervisor.saving.state_tree import Progress, reading
from everstep.supervisor.threads.wakeups import Pending

S = TypeVar("S", bound=Service)
BoundaryOf = Callable[[Service], Boundary]
Actions = Iterable[Pending]


class ServiceBoard:
    """Holds the services in the order in which they run, and tells them the moments of the run.

    Attributes:
        progress: the run's step and epoch.
        apply: applies actions.
        gather_actions: unites the actions of all ranks.
        synchronous: moments inside steps that a service asked for; the others cost nothing.
        looked_at: names of the outputs of steps that services look at.
    """

    progress: Progress
    apply: Callable[[Actions], None]
    gather_actions: Callable[[list[Pending], Iterable[Service]], list[Pending]]

    def __init__(self, collector: Collector, voice: Voice) -> None:
        self._reports = True
        self._collector, self._voice = collector, voice
        self._services: list[Service] = []
        self._readers: dict[str, Reader] = {}
        self._opened: list[Service] = []
        self._failures: dict[str, int] = {}
        """Number of failures of each REPORT service."""
        self.synchronous: set[Moment] = set()
        self.looked_at: set[str] = set()
        self._outputs: dict[str, Any] = {}
        """Outputs of step `_outputs_of`, the newest that had any."""
        self._outputs_of = 0

    def __iter__(self) -> Iterator[Service]:
        return iter(self._services)

    def add(self, service: Service) -> None:
        """Add a service; services run by stage, then in the order in which they were added."""
        require_service(service, self._services)
        self._services.append(service)
        self._services.sort(key=lambda s: (s.stage, s.runs_last))
        reader = Reader()
        if service.window != "none" and self._runs(service):
            saved = service.window == "saved" and not service.schedule.wall
            self._collector.reader(service.name, reader, saved=saved)
        self._readers[service.name] = reader

    def remove(self, service: Service) -> None:
        self._services.remove(service)
        if service.window != "none" and self._runs(service):
            self._collector.drop_reader(service.name)
        del self._readers[service.name]

    def reader(self, service: Service) -> Reader:
        return self._readers[service.name]

    @property
    def bests(self) -> list[Best]:
        return [service for service in self._services if isinstance(service, Best)]

    def measured(self, step: int) -> list[Service]:
        """List the services that look for best values, where an evaluation at this step has found one."""
        return [s for s in self._services if isinstance(s, Best | Conditional) and s.measured == step]

    def wanting(self, moment: Moment) -> list[Service]:
        return [service for service in self._services if moment in service.moments]

    def open(self, run: RunView, now: float) -> None:
        """Open all services, after their state is restored; the console first, so that others can print."""
        for service in sorted(self._services, key=lambda s: s is not self._voice.console):
            self.open_one(service, run, now)

    def open_one(self, service: Service, run: RunView, now: float) -> None:
        service.schedule.start(now)
        if not self._runs(service):
            return
        self._opened.append(service)
        with _isolated_for([service]):
            service.open(run)

    def leave_reports_out(self) -> None:
        """Open and run no service of stage REPORT that is not for every rank: the writer does."""
        self._reports = False
        for service in self._services:
            if service.window != "none" and not self._runs(service):
                self._collector.drop_reader(service.name)  # nobody would ever clear its window

    def _runs(self, service: Service) -> bool:
        return self._reports or service.every_rank or service.stage is not Stage.REPORT

    def due(self, moment: Moment, when: Instant) -> list[Service]:
        wanting = self.wanting(moment)
        with _isolated_for(wanting):
            return [service for service in wanting if service.due(when)]

    def run(
        self, services: Sequence[Service], boundary_of: BoundaryOf, *, finish: bool = False
    ) -> list[Pending]:
        """Run services in order; each runs, whatever an earlier service asked for."""
        actions: list[Pending] = []
        for service in services:
            if not self._runs(service):
                continue
            boundary = boundary_of(service)
            alone = service.stage is Stage.REPORT and self._collector.across is not None
            before, self._collector.alone = self._collector.alone, alone  # a summary runs services inside one
            try:
                outcome = self._run_one(service, service.finish if finish else service.run, boundary)
                if outcome is not None:
                    actions += self._accept(service, outcome, boundary)
            finally:
                self._collector.alone = before
        return actions

    def services_changed(self) -> None:
        self.synchronous = {moment for moment in SYNCHRONOUS if self.wanting(moment)}
        self.looked_at = {
            name for service in self.wanting(Moment.AFTER_STEP) for name in service.output_names
        }

    def view(self, moment: Moment, payload: Any = None) -> BoundaryOf:
        current = self.progress
        outputs = self._outputs if moment is Moment.AFTER_STEP and self._outputs_of == current.step else {}
        stop = None if current.stop is None else current.stop.reason

        def boundary_of(service: Service) -> Boundary:
            return Boundary(
                moment=moment,
                step=current.step,
                epoch=current.epoch,
                readings=self.reader(service),
                stop=stop,
                payload=payload,
                outputs=outputs and {n: outputs[n] for n in service.output_names if n in outputs},
            )

        return boundary_of

    def fire(self, moment: Moment, payload: Any = None) -> None:
        """Tell a moment between boundaries to the services that asked for it, and apply their answers."""
        wanting = self.wanting(moment)
        actions = self.run(wanting, self.view(moment, payload))
        if moment not in OBSERVED:
            self.apply(self.merged(actions, [service for service in wanting if service.controller]))

    def merged(self, actions: list[Pending], may_act: Sequence[Service]) -> list[Pending]:
        """Unite the actions of all ranks, where services have run that may act."""
        return self.gather_actions(actions, self) if may_act else actions

    def announce(self, moment: Moment, payload: Any = None) -> None:
        """Tell a moment inside a step to its observers, which may not act."""
        if moment in self.synchronous:
            self.fire(moment, payload)

    def without_outputs(self, step: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the metrics among a step's values, and keep the outputs that services look at."""
        if self._outputs_of != step:
            self._outputs, self._outputs_of = {}, step
        looked_at = {name: value for name, value in values.items() if name in self.looked_at}
        self._outputs.update(looked_at)
        return {n: v for n, v in values.items() if n not in looked_at or is_scalar(n, v)}

    def _accept(self, service: Service, outcome: Outcome, boundary: Boundary) -> list[Pending]:
        if not isinstance(outcome, Outcome):
            remedy = f"actions=({outcome!r},)" if isinstance(outcome, Action) else "..."
            raise UsageError(
                f"service {service.name!r} returned {outcome!r}; return None or everstep.Outcome({remedy})"
            )
        if not isinstance(outcome.metrics, Mapping):
            raise UsageError(
                f"service {service.name!r} returned {outcome!r}, whose metrics are not a dictionary; "
                "give actions by name: everstep.Outcome(actions=(...,))"
            )
        wall = outcome.wall or service.schedule.wall or boundary.moment is Moment.AFTER_CHECKPOINT
        values = {name: to_scalar(name, value) for name, value in outcome.metrics.items()}
        for name, value in self._collector.reduced(values).items():
            self._collector.require_alone(f"eval/{service.name}", boundary.step, name)
            self._collector.outside(f"eval/{service.name}", boundary.step, name, value, wall=wall)
        _require_may_act(service, outcome.actions, boundary.moment)
        for action in outcome.actions:
            if isinstance(action, SetValue) and action.target not in service.sets:  # nobody has tried it
                raise UsageError(
                    f"service {service.name!r} asked for {action}, but does not declare this target; "
                    f"add to class {type(service).__name__}: sets = {(*service.sets, action.target)!r}"
                )
        return [(service, action) for action in outcome.actions]

    def _run_one(self, service: Service, run: ServiceFunction, boundary: Boundary) -> Outcome | None:
        try:
            with _isolated_for([service]):
                return run(boundary)
        except Exception as error:
            # only a report may fail and be passed over: other stages decide what is trained and saved
            if service.stage is not Stage.REPORT:
                error.add_note(f"in service {service.name!r} (stage {service.stage.name})")
                raise
            count = self._failures[service.name] = self._failures.get(service.name, 0) + 1
            if count <= 10 or count == 10 ** (len(str(count)) - 1):  # it may fail at each step
                times = "" if count <= 10 else f" {count:,} times"
                what = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
                self._voice.warn(f"service {service.name!r} failed{times}, and the training goes on: {what}")
            return None

    def fired(self, services: Iterable[Service], when: Instant) -> None:
        for service in services:
            service.schedule.fired(when)

    def next_step(self, step: int) -> int:
        return min((s.next_step(step) for s in self._schedules()), default=NEVER)

    def next_time(self) -> float | None:
        return earliest(s.next_time() for s in self._schedules())

    def _schedules(self) -> list[Schedule]:
        return [s.schedule for s in self.wanting(Moment.AFTER_STEP)]

    def controllers(self) -> dict[str, Json]:
        """Name and configuration of each controller that has one, for comparison at a resume."""
        configs = {s.name: s.config() for s in self._services if s.controller}
        comparable = {name: config for name, config in configs.items() if config is not None}
        shown: dict[str, Json] = redacted(with_leaves(comparable, plain))
        return shown

    def state(self) -> dict[str, Any]:
        with _isolated_for(self._services):
            states = {s.name: s.state_dict() for s in self._services}
        return {name: {"version": 1, "state": state} for name, state in states.items() if state is not None}

    def begin(self) -> None:
        """Let services that had another run of this process begin as they began that one."""
        with _isolated_for(self._services):
            for service in self._services:
                if "_first_state" not in vars(service):
                    try:
                        vars(service)["_first_state"] = copy.deepcopy(service.state_dict())
                    except AttributeError as error:
                        error.add_note(
                            f"set what {service.name!r} saves in __init__: state comes before open()"
                        )
                        raise
                elif (first := vars(service)["_first_state"]) is not None:
                    service.load_state_dict(copy.deepcopy(first))

    def load(self, saved: dict[str, Any], where: object) -> None:
        """Load the saved state of each service; say a line for each that was added or dropped."""
        known = {s.name: s for s in self._services}
        for name, service in known.items():
            if name in saved:
                with reading(where, f"services/{name}"):
                    service.load_state_dict(saved[name]["state"])
            elif service.state_dict() is not None:
                self._voice.say(f"service {name!r} is new in this run: it starts fresh")
        for name in saved:
            if name not in known:
                self._voice.say(f"service {name!r} was removed: its state is dropped")

    def close(self) -> None:
        """Close all opened services in reverse order, whatever fails."""
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


def find_service(kind: type[S], services: Iterable[Service]) -> S | None:
    return next((service for service in services if isinstance(service, kind)), None)


def require_service(service: Service, others: Iterable[Service]) -> None:
    """Refuse an object that is no Service or could do nothing, and a name that another service has."""
    if not isinstance(service, Service):
        raise ConfigError(
            f"{service!r} is not a Service; pass an instance, such as everstep.EarlyStop(...), "
            "or register a function with loop.on(moment, fn)"
        )
    kind = type(service)
    if not {"name", "schedule"} <= vars(service).keys():
        raise ConfigError(
            f"{kind.__name__}.__init__ does not call super().__init__(); call it in its first line"
        )
    for attribute in ("watches", "sets"):
        # a string is a sequence of its letters, each of which would be taken for a name
        if isinstance(value := getattr(service, attribute), str):
            raise ConfigError(
                f"{attribute} of service {service.name!r} is the string {value!r}; give a tuple: ({value!r},)"
            )
    needs_schedule = kind.run is not Service.run and kind.due is Service.due and not service.guards_saves
    only_scheduled = service.moments and SCHEDULED.issuperset(service.moments)
    if isinstance(service.schedule, Unscheduled) and needs_schedule and only_scheduled:
        raise ConfigError(
            f"service {service.name!r} has no schedule, so its run() would never be called; give class "
            f"{kind.__name__} one, as in default_schedule = everstep.Every(steps=1), or other moments"
        )
    if service.controller and service.stage is Stage.REPORT:
        raise ConfigError(
            f"service {service.name!r} is a controller of stage REPORT, in which no service may act; give "
            f"class {kind.__name__} stage = everstep.services.Stage.DECIDE, or an earlier one"
        )
    if service.name == "metrics":
        raise ConfigError("the service name 'metrics' is taken by the metric windows; give another name=")
    if any(other.name == service.name for other in others):
        raise ConfigError(
            f"two services are named {service.name!r}; names are the keys of their state: "
            "give one of them name="
        )


def _isolated_for(services: Iterable[Service]) -> AbstractContextManager[None]:
    """Isolate random state around the user's own services: training draws the same, whatever they draw."""
    return isolated() if any(service.isolate for service in services) else nullcontext()


def _require_may_act(service: Service, actions: Sequence[Action], moment: Moment) -> None:
    """Refuse actions, except those of a controller up to stage DECIDE and saves at stage SAVE."""
    if actions and moment in OBSERVED:
        raise UsageError(
            f"{moment.name} is for observers, and service {service.name!r} asked for {actions[0]}; act at "
            "another moment, such as AFTER_STEP"
        )
    if service.stage is Stage.SAVE:
        actions = [action for action in actions if not isinstance(action, Save | SaveBest)]
    elif service.stage is not Stage.REPORT and service.controller:
        return
    if actions:
        kind = "a controller" if service.controller else "an observer"
        lacks = [] if service.controller else ["controller = True"]
        if service.stage > Stage.DECIDE:
            lacks.append("stage = everstep.services.Stage.DECIDE or an earlier one")
        raise UsageError(
            f"service {service.name!r} ({kind} of stage {service.stage.name}) asked for {actions[0]}; "
            f"to act, give its class {' and '.join(lacks)}"
        )
