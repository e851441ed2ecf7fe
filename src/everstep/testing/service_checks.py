"""`check_service` and `check_sink`: checks against the laws in a small real loop, for authors of services."""

from __future__ import annotations

import io
import math
import random
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from itertools import cycle
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from everstep import data
from everstep.checkpoint import Store
from everstep.contracts.services import Interrupt, Moment, Service, Stage
from everstep.errors import ConfigError, Interrupted, nearest
from everstep.loop import TrainLoop
from everstep.record import Row, RunJournal
from everstep.schedule import Every, Instant
from everstep.services.checkpoints import Checkpoints
from everstep.services.sink import RemoteSink
from everstep.state import Encoded, array_name, isolated, leaves
from everstep.supervisor import Ending
from everstep.supervisor.board import require_service
from everstep.testing.stream_checks import fingerprint, require_function
from everstep.testing.tools import ManualClock, nothing_left

_EPOCHS, _STEPS = 3, 2
_SECONDS = 100.0
"""Duration of a step by the clock of the check."""
_STARTS = 20
_VALUES = (1.0, 0.5, 0.75)
"""Values of each metric that is collected after an epoch: first better, then worse."""
_PLACES = [
    place
    for epoch in range(1, _EPOCHS + 1)
    for place in (
        *(("step", (epoch - 1) * _STEPS + step) for step in range(1, _STEPS + 1)),
        ("the tail of epoch", epoch),
    )
]
_REACHED = (
    "give the values that its condition waits for, as in "
    'check_service(..., values={"valid_loss": [0.4, 0.4, 0.4]})'
)

_Place: TypeAlias = tuple[str, int]
TraceFunction: TypeAlias = Callable[[FrameType, str, Any], Any]
Value: TypeAlias = tuple[int, str, float]
"""Step, name of the metric, value."""


def check_service(
    make_service: Callable[[], Service],
    *,
    metrics: Sequence[str] = (),
    values: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> None:
    """Check a service against the laws that concern it, in a small real TrainLoop.

    The loop has 3 epochs of 2 steps of 100 seconds each.  It collects "loss" in each step, and "valid_loss"
    and "valid_accuracy" after each epoch, and draws random numbers in each step.  Its state has an entry
    "settings", {"rate": 1.0}, and an entry "optimizer", {"lr": 1.0}, for services that set values: the
    change of each step is multiplied by both.

    1. Name, stage, moments and schedule of the service are valid; unknown keywords are refused.
    2. An observer changes nothing: state and metric rows are those of the run without the service.
    3. The service's state survives: a run that is interrupted, or crashes, at any of its nine boundaries (the
       two in turn) and is started again ends with the same state and rows to the bit.
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
    """
    _check_in_runs(make_service, metrics, values, lambda run_dir, where: None)


def check_sink(
    make_sink: Callable[[], Service],
    read: Callable[[Path], Iterable[Value]],
    *,
    metrics: Sequence[str] = (),
    takes: Callable[[Row], bool] = lambda row: True,
) -> None:
    """Check a sink as `check_service` does, and compare what it holds with the journal after each run.

    After each run, undisturbed, interrupted or crashed, the sink must hold each valid row once, and no other.
    Further runs of a `RemoteSink` end, as by a kill, at each line of its file that two sends run: the server
    that stands for the service may be in that file, too.

    Args:
        make_sink: makes the sink as a new process would make it; called many times.
        read: reads what the sink holds; called with the run directory, returns (step, name, value) of each
            row in any order, the name as it was collected.  Values may be rounded to float32.
        metrics: names of more metrics to collect after each epoch.
        takes: whether the sink writes a row, for a sink that leaves out rows.
    """

    def inspect(run_dir: Path, where: str) -> None:
        rows = [(row.step, row.name, row.value) for row in RunJournal(run_dir).rows() if takes(row)]
        _require_same_rows(_by_place(read(run_dir)), _by_place(rows), where)

    _check_in_runs(make_sink, metrics, {}, inspect)
    if not isinstance(make_sink(), RemoteSink):
        return
    with isolated(), tempfile.TemporaryDirectory() as folder:
        program, lines = _Program(make_sink, metrics, {}, Path(folder)), 0
        while not program.lines_to_kill:  # the run before was killed
            lines += 1
            program.lines_to_kill = lines
            run_dir = program.run().run_dir
            inspect(run_dir, f"killed in {program.killed_in} and started again")


def _by_place(rows: Iterable[Value]) -> dict[tuple[int, str], list[float]]:
    """Return the values of each metric at each step: an epoch's mean is at its last step."""
    places: dict[tuple[int, str], list[float]] = defaultdict(list)
    for step, name, value in rows:
        places[int(step), name].append(float(value))
    return {key: sorted(places[key], key=lambda value: (math.isnan(value), value)) for key in sorted(places)}


def _require_same_rows(sink: Mapping[Any, Any], journal: Mapping[Any, Any], where: str) -> None:
    for key in {**journal, **sink}:
        rows, expected = sink.get(key, []), journal.get(key, [])
        advice = "write each value as it is"
        if len(rows) < len(expected):
            advice = "write all rows, those of earlier starts included"
        elif len(rows) > len(expected):
            advice = (
                "write each row once, and none that a resume has superseded (a service on the network stores "
                "its rows and their position in one transaction: RemoteSink)"
            )
        elif np.allclose(rows, expected, rtol=1e-6, atol=0, equal_nan=True):
            continue
        raise AssertionError(
            f"{where}, the sink has other rows than the journal: of {key[1]!r} at step {key[0]} it has "
            f"{rows}, the journal {expected}; {advice}"
        )


def _check_in_runs(
    make_service: Callable[[], Service],
    metrics: Sequence[str],
    values: Mapping[str, Sequence[float]],
    inspect: Callable[[Path, str], None],
) -> None:
    """Check a service; `inspect` is called with the directory of each run and how it was disturbed."""
    _check_attributes(make_service)
    for name, series in values.items():
        count, each = (_EPOCHS * _STEPS, "step") if name == "loss" else (_EPOCHS, "epoch")
        assert len(series) == count, (
            f"values={{{name!r}: {list(series)}}}: give {count} values, one for each {each}"
        )
    service = make_service()
    with isolated(), tempfile.TemporaryDirectory() as folder:
        program = _Program(make_service, metrics, values, Path(folder))
        whole = program.run()
        assert program.calls["run"] or program.calls["finish"], (
            f"the service never ran in {_EPOCHS} epochs of {_STEPS} steps; give it a schedule that is due"
        )
        known = sorted({row.name for row in RunJournal(whole.run_dir).rows()})
        for metric in service.watches:
            assert metric in known, (
                f"the service watches {metric!r}, which has no values in this check "
                f"({nearest(metric, known)}); correct the name, or give metrics=[{metric!r}]"
            )
        inspect(whole.run_dir, "undisturbed")
        alone = None if service.controller else program.run(without=True)
        if alone is not None:
            _require_same(
                whole, alone, "an observer must change nothing, but with this service", service.name
            )
        # steps and tails, each kind in both ways: the pattern of places has three parts, that of ways two
        for place, how in zip(_PLACES, cycle(("interrupted", "crashed")), strict=False):
            where = f"{how} in {place[0]} {place[1]} and started again"
            again = program.run(how, place)
            hint = "; does its state_dict hold all that run() remembers?"
            _require_same(again, whole, f"its state must survive, but {where}", hint=hint)
            inspect(again.run_dir, where)
        _check_reached(program, make_service())
        failed = None
        with suppress(_PlantedError):
            failed = program.run(failing=True)
        assert (failed is not None) == (service.stage is Stage.REPORT), (
            "a failure in REPORT, and in no other stage, lets the training continue"
        )
        if failed is not None:
            assert any("planted" in text for text in failed.warnings), "a failure must be warned about"
            if alone is not None:
                broken = "a failing REPORT service must change nothing, but"
                _require_same(failed, alone, broken, service.name)


def _check_attributes(make_service: Callable[[], Service]) -> None:
    require_function(make_service, "check_service")
    service, twin = make_service(), make_service()
    require_service(service, ())
    assert service is not twin, "make_service() must make a new service each time"
    assert twin.name == service.name, (
        "the name is the key of the service's state, but two services are called "
        f"{service.name!r}, {twin.name!r}"
    )
    assert isinstance(service.stage, Stage), f"stage {service.stage!r} is not an everstep.services.Stage"
    moments = service.moments
    known = isinstance(moments, frozenset) and all(isinstance(moment, Moment) for moment in moments)
    assert known, f"moments {moments!r}: give a frozenset of everstep.services.Moment"
    for when in (Instant(1, 1, False, 1.0), Instant(2, 1, True, 2.0)):
        assert service.due(when) == service.due(when), f"asked twice, due({when}) gives two answers"
    with suppress(ConfigError, TypeError):
        type(service)(no_such_argument=1)  # type: ignore[call-arg]
        raise AssertionError("an unknown keyword must be refused: leave out **kwargs")


def _check_reached(program: _Program, service: Service) -> None:
    """Require that the runs tried what the service does: a new state, or an action."""
    if len(program.states) > 1 or program.calls["action"]:
        return
    state = service.state_dict()
    assert _is_empty(state), (
        f"the state of {service.name!r} was {state!r} at each boundary, so nobody knows whether it survives; "
        f"{_REACHED}"
    )
    assert not (service.controller and service.stage is Stage.DECIDE), (
        f"the controller {service.name!r} returned no action, so nobody knows what it does; {_REACHED}"
    )


def _is_empty(state: Any) -> bool:
    parts = state.values() if isinstance(state, dict) else state
    return state is None or (isinstance(state, dict | list) and all(map(_is_empty, parts)))


class _CrashError(Exception):
    """Error that ends a start without a save."""


class _KilledError(BaseException):
    """Stands for the kill of a process in a `RemoteSink`."""


class _PlantedError(Exception):
    """Error that the service raises when its failure is tried."""


class _Final(NamedTuple):
    """Result of a run: its last state, by path, and its rows, by place."""

    run_dir: Path
    content: dict[Any, Any]
    warnings: Sequence[str]


class _Program:
    """Runs of a small training program, each in a directory of its own.

    Attributes:
        calls: how often the service's methods were called, and actions returned, in all runs.
        states: different states of the service in all runs.
        lines_to_kill: number of lines of a `RemoteSink` until its process is killed; 0: nothing is.
        killed_in: place of that line.
    """

    def __init__(
        self,
        make_service: Callable[[], Service],
        metrics: Sequence[str],
        values: Mapping[str, Sequence[float]],
        folder: Path,
    ) -> None:
        self._make, self._values, self._folder = make_service, values, folder
        collected = dict.fromkeys(("valid_loss", "valid_accuracy", *metrics, *values))
        self._metrics = [name for name in collected if name != "loss"]
        self.calls: Counter[str] = Counter()
        self.states: list[Any] = []
        self.lines_to_kill = 0
        self.killed_in = ""
        self._runs = 0

    def run(
        self, how: str = "", place: _Place | None = None, *, without: bool = False, failing: bool = False
    ) -> _Final:
        """Run the program until it ends as written.

        Args:
            how: "interrupted" or "crashed", the first time that it is at `place`.
            without: leave out the service.
            failing: let the service raise whenever it runs.
        """
        self._runs += 1
        run_dir = self._folder / str(self._runs)
        for _ in range(_STARTS):
            with nothing_left():
                service, traced = None if without else self._counted(self._make(), failing), sys.gettrace()
                try:
                    if isinstance(service, RemoteSink) and self.lines_to_kill:
                        sys.settrace(self._killing(service))
                    ending = self._start(run_dir, service, how, place)
                except (_CrashError, _KilledError, Interrupted):
                    place = None
                    continue
                finally:
                    sys.settrace(traced)
                    opened, closed = self.calls["open"], self.calls["close"]
                    assert opened == closed, f"opened {opened} times, it was closed {closed} times"
            return _final(run_dir, ending)
        raise AssertionError(f"the run does not end: interrupted {_STARTS} times")

    def _counted(self, service: Service, failing: bool) -> Service:
        inside = False

        def count(method: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                nonlocal inside
                if inside:  # of the service itself, from inside another of its methods
                    return original(*args)
                inside = True
                try:
                    self.calls[method] += 1
                    if failing and method in ("run", "finish"):
                        raise _PlantedError("planted by check_service")
                    outcome = original(*args)
                    state = fingerprint(service.state_dict())
                    if state not in self.states:
                        self.states.append(state)
                    if method in ("run", "finish") and outcome:
                        self.calls["action"] += len(outcome.actions)
                    return outcome
                finally:
                    inside = False

            return call

        own_finish = [] if type(service).finish is Service.finish else ["finish"]
        for method in ("open", "run", "close", *own_finish):
            setattr(service, method, count(method, getattr(service, method)))
        return service

    def _killing(self, sink: RemoteSink) -> TraceFunction:
        """Make the trace function that kills the process in a line of the sink's file.

        Of a line that runs often two times count.
        """
        file, times = type(sink).send.__code__.co_filename, Counter[tuple[str, int]]()

        def trace(frame: FrameType, event: str, argument: Any) -> TraceFunction | None:
            if frame.f_code.co_filename != file:
                return None
            if event == "line":
                function, line = frame.f_code.co_name, frame.f_lineno
                times[function, line] += 1
                self.lines_to_kill -= times[function, line] <= 2
                if not self.lines_to_kill:
                    self.killed_in = f"{function}, line {line} of {Path(file).name}"
                    raise _KilledError
            return trace

        return trace

    def _start(self, run_dir: Path, service: Service | None, how: str, disturbed: _Place | None) -> Ending:
        services = [] if service is None else [service]
        if not isinstance(service, Checkpoints):
            services.append(Checkpoints(Every(steps=4)))
        clock = ManualClock()
        weights, settings, optimizer = np.zeros(4), {"rate": 1.0}, {"lr": 1.0}
        train = data.arrays(np.arange(12.0), batch_size=12 // _STEPS, shuffle=True)

        def disturb(place: _Place) -> None:
            if place == disturbed:
                if how == "crashed":
                    raise _CrashError
                loop.call_soon(Interrupt("interrupted by check_service"))

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
                        disturb(("step", step))
                    with loop.evaluation():
                        usual = _VALUES[epoch - 1] + 0.01 * (random.random() + np.random.rand())
                        loop.collect_metrics({n: self._value(n, epoch - 1, usual) for n in self._metrics})
                    disturb(("the tail of epoch", epoch))
                    loop.print_logs()
        return loop.ending

    def _value(self, metric: str, index: int, usual: float) -> float:
        return self._values[metric][index] if metric in self._values else usual


def _final(run_dir: Path, ending: Ending) -> _Final:
    store = Store(run_dir, ending.segment, lambda text: None)
    checkpoint = store.read(store.names()[-1])
    state = leaves(Encoded(checkpoint.structure, checkpoint.arrays))
    content: dict[Any, Any] = {path: bytes(part) for path, part in state if not _in(path, "wall")}
    for row in RunJournal(run_dir).rows():
        if not row.wall:
            content[row.epoch, row.step, row.phase, row.name, row.seq] = (row.value.hex(), row.count)
    return _Final(run_dir, content, ending.warnings)


def _in(path: str, *folders: str) -> bool:
    return any(path.removesuffix("#") == folder or path.startswith(f"{folder}/") for folder in folders)


def _require_same(got: _Final, expected: _Final, broken: str, without: str = "", hint: str = "") -> None:
    """Require equal state and rows; `without`: service whose own rows and state are left out."""
    left, right = got.content, expected.content
    phase = f"eval/{without}"
    # The metrics of the service also stand in the windows of all readers.
    seqs = array_name(("metrics", "state", "seqs", phase))
    own = ("services", "metrics/state/readers", seqs) if without else ()
    different = [
        key
        for key in {**left, **right}
        if left.get(key) != right.get(key)
        and not (_in(key, *own) if isinstance(key, str) else without and key[2] == phase)
    ]
    assert not different, f"{broken}: {', '.join(map(str, different[:5]))} differ{hint}"
