"""`check_service`: a check of a service against the laws, for authors of services."""

from __future__ import annotations

import io
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from everstep import data
from everstep.checkpoint import Store
from everstep.contracts.services import Interrupt, Moment, Service, Stage
from everstep.errors import ConfigError, Interrupted, nearest
from everstep.loop import TrainLoop
from everstep.record import RunJournal
from everstep.schedule import Every, Instant, Schedule
from everstep.services.checkpoints import Checkpoints
from everstep.state import Encoded, array_name, isolated, leaves
from everstep.supervisor import Ending
from everstep.supervisor.board import require_initialized
from everstep.testing.clock import ManualClock
from everstep.testing.leftovers import nothing_left
from everstep.testing.stream_checks import fingerprint, require_function

_EPOCHS, _STEPS = 3, 2
_SECONDS = 100.0
"""Duration of a step by the clock of the check."""
_STARTS = 20
_VALUES = (1.0, 0.5, 0.75)
"""Values of each metric that is collected after an epoch: first better, then worse."""

_REMEMBERS = "; does its state_dict hold all that run() remembers?"

_REACHED = (
    "give the values that its condition waits for, as in "
    'check_service(..., values={"valid_loss": [0.4, 0.4, 0.4]})'
)

_How = Literal["interrupted", "crashed"]
_Place = tuple[str, int]
Disturb = Callable[[TrainLoop, _Place], None]


def check_service(
    make_service: Callable[[], Service],
    *,
    metrics: Sequence[str] = (),
    values: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Check a service against the laws that concern it, in a small real TrainLoop.

    The loop has 3 epochs of 2 steps of 100 seconds each.  It collects "loss" in each step, and "valid_loss"
    and "valid_accuracy" after each epoch, and draws random numbers in each step.  Its state has an entry
    "settings", {"rate": 1.0}, and an entry "optimizer", {"lr": 1.0}, for services that set values: the
    change of each step is multiplied by both.

    1. Name, stage, moments and schedule of the service are valid; unknown keywords are refused.
    2. An observer changes nothing: state and metric rows are those of the run without the service.
    3. The service's state survives: a run that is interrupted at each boundary, or crashes in each body,
       and is started again, ends with the same state and rows to the bit.
    4. A service that raises is closed all the same.  In stage REPORT the training continues with a
       warning; in any other stage the error is raised.
    5. The service is closed once for each time that it was opened, and leaves no thread, file or handler.
    6. The runs try the service: the metrics that it watches have values; a state changes, or an action is
       returned, by each service that has a state, and by each controller of stage DECIDE.

    Args:
        make_service: makes the service as a new process would make it; called many times.
        metrics: names of more metrics to collect after each epoch.
        values: values of metrics by name, for a service that waits for certain values: 6 for "loss", one for
            each step; 3 for any other name, one for each epoch.

    Raises:
        AssertionError: says which law is broken, and where.
    """
    check_in_runs(make_service, metrics, lambda run_dir, where: None, values or {})


def check_in_runs(
    make_service: Callable[[], Service],
    metrics: Sequence[str],
    inspect: Callable[[Path, str], None],
    values: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> None:
    """Do the work of `check_service`, and inspect each run that has ended.

    Args:
        inspect: called with the run directory, and words that say how the run was disturbed.
    """
    _check_facts(make_service)
    _check_values(values)
    program = _Program(make_service, metrics, values)
    with isolated(), tempfile.TemporaryDirectory() as folder:
        program.folder = Path(folder)
        whole = program.run(program.make)
        assert program.calls["run"] or program.calls["finish"], (
            f"the service never ran in {_EPOCHS} epochs of {_STEPS} steps; give it a schedule that is due"
        )
        _check_watched(program.make_service(), whole)
        inspect(whole.run_dir, "undisturbed")
        alone = None if make_service().controller else program.run(lambda: None)
        if alone is not None:
            _require_same(whole, alone, "an observer must change nothing, but with this service", own=whole)
        for place in _places():
            for how, disturb in _DISTURBANCES.items():
                again = program.run(program.make, lambda loop, here: disturb(loop, here == place))  # noqa: B023
                where = f"{how} in {place[0]} {place[1]} and started again"
                _require_same(again, whole, f"its state must survive, but {where}", hint=_REMEMBERS)
                inspect(again.run_dir, where)
        _check_reached(program)
        _check_failure(program, alone)


# ----------------------------------------------------------------------------------- the rules


def _check_facts(make_service: Callable[[], Service]) -> None:
    require_function(make_service, "check_service")
    service, twin = make_service(), make_service()
    assert isinstance(service, Service), f"{service!r} is not an everstep.Service"
    require_initialized(service)
    assert service is not twin, "make_service() must make a new service each time"
    name = service.name
    assert isinstance(name, str) and name and "/" not in name, (
        f"name {name!r}: give a string without '/', not empty"
    )
    assert twin.name == name, (
        f"the name is the key of the service's state, but two services are called {name!r}, {twin.name!r}"
    )
    assert isinstance(service.stage, Stage), f"stage {service.stage!r} is not an everstep.Stage"
    moments = service.moments
    known = isinstance(moments, frozenset) and all(isinstance(moment, Moment) for moment in moments)
    assert known, f"moments {moments!r}: give a frozenset of everstep.Moment"
    assert isinstance(service.schedule, Schedule), f"schedule {service.schedule!r} is not a Schedule"
    for when in (Instant(1, 1, False, 1.0), Instant(2, 1, True, 2.0)):
        assert service.due(when) == service.due(when), f"asked twice, due({when}) gives two answers"
    with suppress(ConfigError, TypeError):
        type(service)(no_such_argument=1)  # type: ignore[call-arg]
        raise AssertionError("an unknown keyword must be refused: leave out **kwargs")


def _check_values(values: Mapping[str, Sequence[float]]) -> None:
    for name, given in values.items():
        count, each = (_EPOCHS * _STEPS, "step") if name == "loss" else (_EPOCHS, "epoch")
        assert len(given) == count, (
            f"values={{{name!r}: {list(given)}}}: give {count} values, one for each {each}"
        )


def _check_watched(service: Service, whole: _Final) -> None:
    known = sorted({row.name for row in RunJournal(whole.run_dir).rows()})
    for metric in service.watches:
        assert metric in known, (
            f"the service watches {metric!r}, which has no values in this check ({nearest(metric, known)}); "
            f"correct the name, or give metrics=[{metric!r}]"
        )


def _check_reached(program: _Program) -> None:
    """Require that the runs tried what the service does: a new state, or an action."""
    service = program.make_service()
    if len(program.states) > 1 or program.calls["action"]:
        return
    state = service.state_dict()
    assert state is None or state in ([], {}), (
        f"the state of {service.name!r} was {state!r} at each boundary, so nobody knows whether it survives; "
        f"{_REACHED}"
    )
    assert not (service.controller and service.stage is Stage.DECIDE), (
        f"the controller {service.name!r} returned no action, so nobody knows what it does; {_REACHED}"
    )


def _check_failure(program: _Program, alone: _Final | None) -> None:
    reports = program.make_service().stage is Stage.REPORT
    final: _Final | None = None
    with suppress(_Planted):
        final = program.run(program.make_failing)
    assert (final is not None) == reports, (
        "a failure in REPORT, and in no other stage, lets the training continue"
    )
    if final is not None:
        assert any("planted" in text for text in final.ending.warnings), "a failure must be warned about"
        if alone is not None:
            _require_same(final, alone, "a failing REPORT service must change nothing, but", own=final)


# ------------------------------------------------------------------------------------ the runs


class _Crash(Exception):
    """Error that ends a start without a save."""


class _Planted(Exception):
    """Error that the service raises when its failure is tried."""


class _Final(NamedTuple):
    run_dir: Path
    name: str | None
    services: frozenset[str]
    leaves: dict[str, bytes]
    rows: dict[Any, Any]
    ending: Ending


def _places() -> Iterator[_Place]:
    for epoch in range(1, _EPOCHS + 1):
        for step in range(1, _STEPS + 1):
            yield "step", (epoch - 1) * _STEPS + step
        yield "the tail of epoch", epoch


def _interrupt(loop: TrainLoop, here: bool) -> None:
    if here:
        loop.call_soon(Interrupt("interrupted by check_service"))


def _crash(loop: TrainLoop, here: bool) -> None:
    if here:
        raise _Crash


_DISTURBANCES: dict[_How, Callable[[TrainLoop, bool], None]] = {"interrupted": _interrupt, "crashed": _crash}


def _own_finish(service: Service) -> list[str]:
    return [] if type(service).finish is Service.finish else ["finish"]


class _Program:
    """Runs of a small training program, each in a directory of its own."""

    def __init__(
        self,
        make_service: Callable[[], Service],
        metrics: Sequence[str],
        values: Mapping[str, Sequence[float]],
    ) -> None:
        collected = ("valid_loss", "valid_accuracy", *metrics, *values)
        self.make_service, self.values = make_service, values
        self.metrics = tuple(dict.fromkeys(name for name in collected if name != "loss"))
        self.folder = Path()
        self.calls: Counter[str] = Counter()
        self.states: list[Any] = []
        """Different states of the service, so far."""
        self._runs = 0

    def make(self) -> Service:
        """Make the service, with its calls counted."""
        service = self.make_service()
        for method in ("open", "run", "close", *_own_finish(service)):
            setattr(service, method, self._counted(service, method, getattr(service, method)))
        return service

    def _counted(self, service: Service, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls[method] += 1
            outcome = original(*args)
            self._look(service)
            if method in ("run", "finish"):
                self.calls["action"] += len(outcome.actions) if outcome else 0
            return outcome

        return call

    def _look(self, service: Service | None) -> None:
        """Note the service's state, if it is a new one."""
        state = None if service is None else fingerprint(service.state_dict())
        if service is not None and state not in self.states:
            self.states.append(state)

    def make_failing(self) -> Service:
        """Make the service so that it raises whenever it runs."""
        service = self.make()

        def fail(boundary: Any) -> None:
            raise _Planted("planted by check_service")

        for method in ("run", *_own_finish(service)):
            setattr(service, method, fail)
        return service

    def run(self, make: Callable[[], Service | None], disturb: Disturb = lambda loop, place: None) -> _Final:
        """Start the program with a disturbance, then without one until it ends as written."""
        self._runs += 1
        run_dir = self.folder / str(self._runs)
        for _ in range(_STARTS):
            with nothing_left():
                service = make()
                try:
                    ending = self._start(run_dir, service, disturb)
                except (_Crash, Interrupted):
                    disturb = lambda loop, place: None  # noqa: E731
                    continue
                finally:
                    opened, closed = self.calls["open"], self.calls["close"]
                    assert opened == closed, f"opened {opened} times, it was closed {closed} times"
            return _final(run_dir, ending, None if service is None else service.name)
        raise AssertionError(f"the run does not end: interrupted {_STARTS} times")

    def _start(self, run_dir: Path, service: Service | None, disturb: Disturb) -> Ending:
        services = [] if service is None else [service]
        if not isinstance(service, Checkpoints):
            services.append(Checkpoints(Every(steps=4)))
        clock = ManualClock()
        weights, settings, optimizer = np.zeros(4), {"rate": 1.0}, {"lr": 1.0}
        train = data.arrays(np.arange(12.0), batch_size=12 // _STEPS, shuffle=True)
        with redirect_stdout(io.StringIO()):
            with TrainLoop(
                run_dir,
                {"weights": weights, "settings": settings, "optimizer": optimizer},
                max_epoch=_EPOCHS,
                seed=7,
                services=services,
                default_services=False,
                clock=clock,
            ) as loop:
                for epoch in loop.iter_epochs():
                    for step, batch in loop.iter_steps(train):
                        change = np.sin(batch).mean() + np.random.rand(4) + random.random()
                        weights += settings["rate"] * optimizer["lr"] * change
                        clock.advance(_SECONDS)
                        loop.collect_metrics(loss=self._value("loss", step - 1, weights.mean()))
                        self._look(service)
                        disturb(loop, ("step", step))
                    with loop.evaluation():
                        usual = _VALUES[epoch - 1] + 0.01 * (random.random() + np.random.rand())
                        loop.collect_metrics({n: self._value(n, epoch - 1, usual) for n in self.metrics})
                    self._look(service)
                    disturb(loop, ("the tail of epoch", epoch))
                    loop.print_logs()
        return loop.ending

    def _value(self, metric: str, index: int, usual: float) -> float:
        return self.values[metric][index] if metric in self.values else usual


# ------------------------------------------------------------------------------- what is compared


def _final(run_dir: Path, ending: Ending, name: str | None) -> _Final:
    store = Store(run_dir, ending.segment, lambda text: None)
    checkpoint = store.read(store.names()[-1])
    encoded = Encoded(checkpoint.structure, checkpoint.arrays)
    structure: Any = checkpoint.structure
    found = {path: bytes(part) for path, part in leaves(encoded) if path.split("/", 1)[0] != "wall"}
    rows = {
        (row.epoch, row.step, row.phase, row.name, row.seq): (row.value.hex(), row.count)
        for row in RunJournal(run_dir).rows()
        if not row.wall
    }
    return _Final(run_dir, name, frozenset(structure["services"]), found, rows, ending)


def _require_same(
    got: _Final, expected: _Final, broken: str, own: _Final | None = None, hint: str = ""
) -> None:
    """Require equal state and rows; `own`: run whose service's own rows and state are left out."""
    foreign: set[str | None] = set()
    metrics: set[str] = set()
    if own is not None:
        foreign = {own.name, *(got.services ^ expected.services)}
        metrics = {name for _, _, phase, name, _ in own.rows if phase == f"eval/{own.name}"}
    left, right = (_without(final, foreign, metrics) for final in (got, expected))
    different = [key for key in [*left, *right] if left.get(key) != right.get(key)]
    assert not different, f"{broken}: {', '.join(dict.fromkeys(map(str, different[:5])))} differ{hint}"


def _without(final: _Final, services: set[str | None], metrics: set[str]) -> dict[Any, Any]:
    """Return leaves and rows, without those of some services; their metrics also stand in others' windows."""
    state = ("services", "metrics", "state")
    places: list[tuple[str | None, ...]] = [
        path
        for name in services
        for path in (("services", name), (*state, "readers", name), (*state, "seqs", f"eval/{name}"))
    ]
    windows = [
        (*state, "readers", reader, part)
        for reader in ("print epoch", "print steps", *final.services)
        for part in ("windows", "values", "nonfinite")
    ]
    places += [(*window, metric) for window in windows for metric in metrics]
    paths = [array_name(path) for path in places]
    # The names in a window; the values under each name are compared.
    names = {f"{array_name(window)}#" for window in windows if metrics}
    kept = {
        path: value
        for path, value in final.leaves.items()
        if path not in names
        and not any(path.removesuffix("#") == own or path.startswith(f"{own}/") for own in paths)
    }
    phases = {f"eval/{name}" for name in services}
    return {**kept, **{key: value for key, value in final.rows.items() if key[2] not in phases}}
