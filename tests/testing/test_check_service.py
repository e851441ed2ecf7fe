"""The suites for services and sinks: built-in ones pass, and each law finds its planted fault."""

from __future__ import annotations

import csv
import json
import random
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import everstep
from everstep import Every, Outcome, Save, Service, Stop, backends
from everstep.errors import UsageError
from everstep.services import (
    CSV,
    Annealing,
    Export,
    FinalValues,
    JSONLines,
    LogVariables,
    LossBound,
    Moment,
    OnBest,
    Plateau,
    Profile,
    RemoteSink,
    Require,
    Scheduled,
    SetValue,
    Sink,
    Stage,
    System,
    TensorBoard,
    Throughput,
    When,
)
from everstep.services.checkpoints import JournalFlush
from everstep.services.judges import FunctionService
from everstep.testing import check_service, check_sink
from everstep.testing.checks import Value, _Program


def record() -> Service:
    """One more of it: every run has one already."""
    service = JournalFlush()
    service.name = "another record"
    return service


def looks(boundary: everstep.Boundary) -> None:
    boundary.readings.stats("loss")
    boundary.readings.clear()
    np.random.rand()


def evaluated(service: everstep.Evaluate) -> dict[str, float]:
    return {"valid/loss": 0.5}


EACH, HALVE = Every(steps=1), SetValue("settings.rate", times=0.5)
# no boundary runs Dump here, which is for a Trainer, Retry, Notify, HangWatch, Index and GlobalStepWaiter
BUILT_IN: dict[str, Callable[[], Service]] = {
    "Checkpoints": lambda: everstep.Checkpoints(Every(steps=3)),
    "Checkpoints, all defaults": lambda: everstep.Checkpoints(),
    "Console": lambda: everstep.services.Console(Every(steps=1), plain_seconds=150),
    "EarlyStop": lambda: everstep.EarlyStop("valid_loss", patience=1),
    "EarlyStop on the steps' mean": lambda: everstep.EarlyStop("loss", patience=2),
    "Best": lambda: everstep.Best("valid_accuracy"),
    "Best, restored": lambda: everstep.Best("valid_loss", restore_at_end=True),
    "Best by the steps' mean": lambda: everstep.Best("loss", "max", save=False),
    "NaNGuard": lambda: everstep.services.NaNGuard(metrics=["*"]),
    "Recovery": everstep.services.Recovery,
    "StopAfter steps": lambda: everstep.services.StopAfter(steps=3),
    "StopAfter epochs": lambda: everstep.services.StopAfter(epochs=2),
    "StopAfter seconds": lambda: everstep.services.StopAfter(seconds=150),
    "Record": record,
    "Best of several": lambda: everstep.Best("valid_accuracy", keep=2),
    "Plateau": lambda: Plateau("loss", then=SetValue("settings.rate", 0.5), long=2, short=1),
    "Plateau that rests": lambda: Plateau("loss", then=HALVE, long=2, short=1, cooldown=1, every=EACH),
    "Require by an epoch": lambda: Require("valid_loss", 0.6, epoch=3),
    "Require by a step": lambda: Require("loss", 0.0, "max", step=4, every=Every(steps=1)),
    "LossBound": lambda: LossBound(bound=1e9),
    "LossBound by the median": lambda: LossBound(times=9, last=2),
    "Scheduled": lambda: Scheduled("settings.rate", Annealing(1, 0.9)),
    "Scheduled by a function": lambda: Scheduled(
        "settings.rate", lambda step: 1 / step, every=Every(steps=2)
    ),
    "When": lambda: When(OnBest("valid_loss"), [Save(), HALVE]),
    "When a function says so": lambda: When(lambda boundary: boundary.step % 3 == 1, HALVE, every=EACH),
    "Evaluate": lambda: everstep.Evaluate("valid", Every(steps=4) | Every(epochs=1), evaluator=evaluated),
    "Export": lambda: Export(OnBest("valid_loss"), entry="weights", keep=1),
    "LogVariables": lambda: LogVariables(every=Every(steps=4)),
    "FinalValues": lambda: FinalValues(lambda: {"one": 1.0}),
    "Throughput": lambda: Throughput(4, every=Every(steps=2)),
    "System": lambda: System(every=Every(steps=2)),
    "Profile": lambda: Profile(Every(steps=2), steps=1, keep=1),
    "a function after steps": lambda: FunctionService(Moment.AFTER_STEP, looks, 2, "mine"),
    "a function after epochs": lambda: FunctionService(Moment.AFTER_EPOCH, looks, None, "mine"),
    "a function before steps": lambda: FunctionService(Moment.BEFORE_STEP, looks, None, "mine"),
}


DEAR = ["StopAfter seconds", "Record", "Console", "Throughput", "System", "Profile"]
DEAR += [name for name in BUILT_IN if name.startswith("a function")]
"""What the campaign alone checks: services without a state, which only measure and tell."""


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in DEAR])
def test_built_in_services_pass(name: str) -> None:
    check_service(BUILT_IN[name])


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("name", DEAR)
def test_services_that_measure_and_tell_pass(name: str) -> None:
    backends.get("torch")  # Profile would import it in the middle of the check
    check_service(BUILT_IN[name])


class Counting(Service):
    """Correct: adds how often it ran to the record, and remembers that."""

    stage = Stage.EVALUATE

    def __init__(self) -> None:
        super().__init__("counting", Every(steps=1))
        self.runs = 0

    def run(self, boundary: everstep.Boundary) -> Outcome | None:
        self.runs += 1
        return Outcome({"runs": self.runs})

    def state_dict(self) -> Any:
        return self.runs

    def load_state_dict(self, state: Any) -> None:
        self.runs = state


class Stops(Counting):
    """Correct: stops at the fourth boundary at which a metric is 0.5."""

    stage = Stage.DECIDE
    controller = True
    metric = "loss"

    def run(self, boundary: everstep.Boundary) -> Outcome | None:
        stats = boundary.readings.stats(self.metric)
        boundary.readings.clear()
        self.runs += stats is not None and stats.last == 0.5
        return Outcome(actions=(Stop("enough"),)) if self.runs == 4 else None


def changed(kind: type[Service] = Counting, **attributes: Any) -> Callable[[], Service]:
    return type(kind.__name__, (kind,), attributes)


def forgets(self: Any, state: Any = None) -> None:
    return None


def opens(function: Callable[[Any], object]) -> Any:
    return lambda self, run: function(run)


def meddle(run: Any) -> None:
    run.max_step = 3


HELD: list[Any] = []
"""What faults leave, to be given back."""
DONE, NUMBERS = threading.Event(), count()


def leave_a_thread(run: Any) -> None:
    DONE.clear()
    threading.Thread(target=DONE.wait, daemon=True, name="leaked").start()


def numbered(self: Any) -> None:
    Counting.__init__(self)
    self.name = f"number {next(NUMBERS)}"


def undecided(self: Any, when: Any) -> bool:
    self.runs += 1
    return self.runs % 2 == 0


class TakesAnything(Counting):
    def __init_subclass__(cls) -> None:
        pass


def takes_anything(self: Any, **options: Any) -> None:
    Counting.__init__(self)


def of_this_start(self: Any, boundary: Any) -> Outcome:
    return Outcome({"segment": self.segment})


SIX = {"loss": [0.5] * 6}
FAULTS: list[tuple[Callable[[], Service], str]] = [
    (
        changed(isolate=False, run=lambda self, b: random.random() and None),
        "an observer must change nothing.*rng/rank0/python",
    ),
    (changed(isolate=False, open=opens(lambda run: np.random.rand())), "an observer must change nothing"),
    (changed(open=opens(meddle)), "an observer must change nothing.*progress"),
    (
        changed(state_dict=forgets),
        "remembers, but interrupted in step 1 and started again these .*counting/values/runs",
    ),
    (changed(open=opens(leave_a_thread)), "outlive the block: thread leaked"),
    (
        changed(open=opens(lambda run: HELD.append(Path(__file__).open()))),  # noqa: SIM115
        "outlive the block: file .*test_check_service",
    ),
    (changed(__init__=numbered), "two services are called 'number 0', 'number 1'"),
    (changed(due=undecided), "two answers"),
    (changed(moments=[Moment.AFTER_STEP]), "frozenset"),
    (changed(due=lambda self, when: False), "never ran"),
    (changed(TakesAnything, __init__=takes_anything), "unknown keyword"),
    # its metric depends on how often the process was started, which is no part of the run
    (
        changed(
            stage=Stage.REPORT,
            run=of_this_start,
            open=lambda self, run: setattr(self, "segment", run.segment),
        ),
        "counting/values/segment",
    ),
    (changed(Stops), r"'counting' was 0 at each boundary.*values="),
    (changed(Stops, state_dict=forgets), r"'counting' returned no action.*values="),
    (changed(watches=("valid_los",)), "watches 'valid_los', which has no values.*'valid_loss'"),
]


@pytest.mark.campaign("long", gate=6)
@pytest.mark.parametrize(("make", "message"), FAULTS)
def test_each_fault_is_found(make: Callable[[], Service], message: str) -> None:
    try:
        with pytest.raises(AssertionError, match=message):
            check_service(make)
    finally:
        DONE.set()
        while HELD:
            HELD.pop().close()


def test_an_action_without_an_outcome_is_found_in_each_stage() -> None:
    for stage, acts in ((Stage.REPORT, False), (Stage.DECIDE, True)):
        with pytest.raises(UsageError, match=r"returned Stop.*everstep.Outcome\(actions="):
            check_service(changed(stage=stage, controller=acts, run=lambda self, b: Stop("x")))


class Looks(Service):
    """Looks at a model, which the check's state has only where it is given."""

    def __init__(self) -> None:
        super().__init__(schedule=Every(steps=1))

    def open(self, run: everstep.services.RunView) -> None:
        self.live_object = run.live_object

    def run(self, boundary: everstep.Boundary) -> None:
        assert self.live_object("model").weight.shape == (1, 2)


def test_an_error_that_a_run_would_only_warn_of_fails_the_check() -> None:
    """In stage REPORT."""
    with pytest.raises(AssertionError, match="undisturbed, the service raised ConfigError: no state entry"):
        check_service(Looks)
    check_service(Looks, make_state=lambda: {"model": torch.nn.Linear(2, 1)})


@pytest.mark.campaign("long")
def test_values_make_a_condition_come_true() -> None:
    check_service(Stops, values=SIX)
    with pytest.raises(AssertionError, match="state_dict must hold all"):
        check_service(changed(Stops, state_dict=forgets), values=SIX)
    with pytest.raises(AssertionError, match=r"'loss': \[1.0\]\}: give 6 values, one for each step"):
        check_service(Stops, values={"loss": [1.0]})


@pytest.mark.campaign("long")
@pytest.mark.parametrize(
    "make",
    [
        Counting,
        # random numbers drawn by an isolated service are put back
        changed(open=opens(lambda run: np.random.rand())),
        # a metric that is not a time stands in the window of the epoch's line at the end
        changed(run=lambda self, b: Outcome({"length": 2.0}), stage=Stage.REPORT, state_dict=forgets),
        changed(
            Stops,
            sets=("optimizer.lr",),
            run=lambda self, b: Outcome(actions=(SetValue("optimizer.lr", times=0.9),)),
        ),
    ],
)
def test_a_correct_service_passes(make: Callable[[], Service]) -> None:
    check_service(make)


def test_what_a_run_refuses_is_refused(tmp_path: Path) -> None:
    sets = changed(Stops, run=lambda self, b: Outcome(actions=(SetValue("optimizer.lr", times=0.9),)))
    with pytest.raises(everstep.errors.UsageError, match=r"sets = \('optimizer.lr',\)"):
        check_service(sets)
    unready = changed(Service, __init__=lambda self: None)
    with pytest.raises(everstep.errors.ConfigError, match=r"does not call super\(\).__init__\(\)"):
        check_service(unready)
    with pytest.raises(everstep.errors.ConfigError, match=r"does not call super\(\).__init__\(\)"):
        everstep.Supervisor(tmp_path / "run", services=[unready()])
    with pytest.raises(everstep.errors.ConfigError, match="'unscheduled' has no schedule"):
        check_service(type("Unscheduled", (Service,), {"run": forgets}))
    with pytest.raises(AssertionError, match=r"check_service\(lambda: Counting\(\.\.\.\)\)"):
        check_service(Counting())  # type: ignore[arg-type]
    wrong: Any = 3
    with pytest.raises(everstep.errors.ConfigError, match="schedule=3 of service 's'"):
        Service("s", schedule=wrong)
    with pytest.raises(everstep.errors.ConfigError, match="every=3 of service 'best loss'"):
        everstep.Best("loss", every=wrong)
    with pytest.raises(everstep.errors.ConfigError, match="'nmae'; did you mean 'name'"):
        changed(Service)(nmae="x")  # type: ignore[call-arg]


@pytest.mark.campaign("long")
def test_a_metric_of_ones_own_is_collected_on_request() -> None:
    seen: list[float] = []
    check_service(changed(open=opens(lambda run: run.watch("bleu", seen.append))), metrics=["bleu"])
    assert seen


KEYS = ("step", "epoch", "phase")


def metrics_of(line: dict[str, Any]) -> Iterator[Value]:
    return ((int(line["step"]), n, float(v)) for n, v in line.items() if n not in KEYS and v != "")


def json_lines(run_dir: Path) -> Iterator[Value]:
    for line in (run_dir / "logs/metrics.jsonl").read_text().splitlines():
        yield from metrics_of(json.loads(line))


def table(run_dir: Path) -> Iterator[Value]:
    with open(run_dir / "logs/metrics.csv", newline="") as file:
        for line in csv.DictReader(file):
            yield from metrics_of(line)


def points(run_dir: Path) -> Iterator[Value]:
    events = EventAccumulator(str(run_dir / "logs/tensorboard"), {"scalars": 0})
    events.Reload()
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            yield event.step, tag.removeprefix("epoch/"), event.value


SINKS: dict[str, tuple[Callable[[], Service], Callable[[Path], Iterable[Value]]]] = {
    "JSONLines": (lambda: JSONLines(every=Every(steps=1)), json_lines),
    "CSV": (lambda: CSV(), table),
    "TensorBoard": (lambda: TensorBoard(every=Every(steps=2)), points),
    "one of one method": (lambda: Plain("logs/metrics.jsonl"), json_lines),
}


class Plain(Sink):
    """Correct: a JSON object per line."""

    def write(self, file: IO[Any], items: Iterable[Any]) -> None:
        for line in self.lines(items):
            file.write(json.dumps(line) + "\n")


@pytest.mark.campaign("long")
@pytest.mark.parametrize("name", SINKS)
def test_correct_sinks_hold_what_the_journal_holds(name: str) -> None:
    check_sink(*SINKS[name])


@pytest.mark.campaign("long")
def test_a_sink_that_leaves_out_rows_says_which() -> None:
    check_sink(lambda: CSV(metrics=["loss"]), table, takes=lambda row: row.name == "loss")


def twice(self: Sink, file: IO[Any], items: Iterable[Any]) -> None:
    items = list(items)
    Plain.write(self, file, items)  # type: ignore[arg-type]
    Plain.write(self, file, items)  # type: ignore[arg-type]


def on_top_of_the_old(self: Sink, parts: Any) -> None:
    """Append to the file of the start before, whatever a resume has superseded."""
    self.path.parent.mkdir(exist_ok=True)
    self._file = open(self.path, "a")  # noqa: SIM115
    self._add(parts[-1][1])


def rounded(self: Sink, file: IO[Any], items: Iterable[Any]) -> None:
    for line in self.lines(items):
        file.write(json.dumps({n: round(v, 2) if n == "loss" else v for n, v in line.items()}) + "\n")


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            {"begin": lambda self, parts: Sink.begin(self, parts[-1:])},
            r"interrupted in step 1 and started again, the sink lacks \[\(1, 'loss'",
        ),
        ({"write": twice}, r"undisturbed, the sink lacks \[\] and should not have \[\("),
        ({"begin": on_top_of_the_old}, r"started again, the sink lacks \[\] and should not have \[\("),
        ({"write": rounded}, r"undisturbed, the sink lacks \[\(1, 'loss'"),
    ],
)
def test_a_broken_sink_is_found(fault: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_sink(lambda: type("Broken", (Plain,), fault)("logs/metrics.jsonl"), json_lines)


class Posts(RemoteSink):
    """Correct: a file stands for a service on the network, which stores values and position together."""

    def stored(self) -> dict[str, Any]:
        file = self.run_dir / "server.json"
        return json.loads(file.read_text()) if file.exists() else {"position": "", "values": []}

    def store(self, **parts: Any) -> None:
        beside = self.run_dir / "server.new"
        beside.write_text(json.dumps({**self.stored(), **parts}))
        beside.replace(self.run_dir / "server.json")

    def position(self) -> str:
        return str(self.stored()["position"])

    def values(self, lines: list[dict[str, Any]]) -> list[Value]:
        return [*self.stored()["values"], *(value for line in lines for value in metrics_of(line))]

    def send(self, lines: list[dict[str, Any]], position: str) -> None:
        self.store(values=self.values(lines), position=position)


class Rows(RemoteSink):
    """Has a connection open, also where its process is killed."""

    def position(self) -> str:
        return ""

    def send(self, lines: list[dict[str, Any]], position: str) -> None:
        with closing(sqlite3.connect(self.run_dir / "rows.db")) as db:
            db.execute("create table if not exists rows (n)")


# the exception that stands for a kill may come before `closing` has the connection; Python 3.13 warns of it
@pytest.mark.filterwarnings("ignore:.*sqlite3.Connection:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")
def test_a_kill_closes_the_connections_of_a_sink(tmp_path: Path) -> None:
    program = _Program(Rows, (), {}, tmp_path)
    for lines in range(2, 6):  # the last ones are where the block ends
        program.lines_to_kill = lines
        program.run()
    assert program.killed_in.startswith("send")


class PositionLater(Posts):
    def send(self, lines: list[dict[str, Any]], position: str) -> None:
        self.store(values=self.values(lines))
        self.store(position=position)


class PositionFirst(Posts):
    def send(self, lines: list[dict[str, Any]], position: str) -> None:
        self.store(position=position)
        self.store(values=self.values(lines))


def posts(run_dir: Path) -> list[Value]:
    return [
        (step, name, value)
        for step, name, value in json.loads((run_dir / "server.json").read_text())["values"]
    ]


def test_a_sink_for_a_service_on_the_network_is_killed_in_each_line() -> None:
    check_sink(Posts, posts)
    for broken, message in (
        (PositionLater, r"killed in .*, line .*lacks \[\] and should not have \[\("),
        (PositionFirst, r"killed in .*, line .*the sink lacks \[\(1, 'loss'"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_sink(broken, posts)
