"""The suites for services and sinks: built-in ones pass, and each law finds its planted fault."""

from __future__ import annotations

import csv
import json
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import everstep
from everstep import Every, Moment, Outcome, Save, Service, SetValue, Stage, Stop, backends
from everstep.services import (
    CSV,
    Annealing,
    Export,
    FinalValues,
    JSONLines,
    LogVariables,
    LossBound,
    OnBest,
    Plateau,
    Profile,
    ProgressBar,
    Require,
    Scheduled,
    Sink,
    System,
    TensorBoard,
    Throughput,
    When,
)
from everstep.services.checkpoints import JournalFlush
from everstep.services.when import FunctionService
from everstep.testing import armed, check_service, check_sink, nothing_left
from everstep.testing.service_checks import Value


def record() -> Service:
    """One more of it: every run has one already."""
    service = JournalFlush()
    service.name = "another record"
    return service


def looks(boundary: everstep.Boundary) -> None:
    boundary.readings.stats("loss")
    boundary.readings.clear()
    np.random.rand()


BUILT_IN: dict[str, Callable[[], Service]] = {
    "Checkpoints": lambda: everstep.Checkpoints(Every(steps=3)),
    "Checkpoints, all defaults": lambda: everstep.Checkpoints(),
    "Console": lambda: everstep.Console(Every(steps=1), plain_seconds=150),
    "EarlyStop": lambda: everstep.EarlyStop("valid_loss", patience=1),
    "EarlyStop on the steps' mean": lambda: everstep.EarlyStop("loss", patience=2),
    "Best": lambda: everstep.Best("valid_accuracy"),
    "Best, restored": lambda: everstep.Best("valid_loss", restore_at_end=True),
    "Best by the steps' mean": lambda: everstep.Best("loss", "max", save=False),
    "NaNGuard": lambda: everstep.NaNGuard(metrics=["*"]),
    "Recovery": everstep.Recovery,
    "StopAfter steps": lambda: everstep.StopAfter(steps=3),
    "StopAfter epochs": lambda: everstep.StopAfter(epochs=2),
    "StopAfter seconds": lambda: everstep.StopAfter(seconds=150),
    "Record": record,
    "Best of several": lambda: everstep.Best("valid_accuracy", keep=2),
    "Plateau": lambda: Plateau("loss", then=SetValue("settings.rate", 0.5), long=2, short=1),
    "Require by an epoch": lambda: Require("valid_loss", 0.6, epoch=2),
    "Require by a step": lambda: Require("loss", 0.0, "max", step=4, every=Every(steps=1)),
    "LossBound": lambda: LossBound(bound=1e9),
    "LossBound by the median": lambda: LossBound(times=9, last=2),
    "Scheduled": lambda: Scheduled("settings.rate", Annealing(1, 0.9)),
    "Scheduled by a function": lambda: Scheduled(
        "settings.rate", lambda step: 1 / step, every=Every(steps=2)
    ),
    "When": lambda: When(OnBest("valid_loss"), [Save(), SetValue("settings.rate", times=0.5)]),
    "Export": lambda: Export(OnBest("valid_loss"), entry="weights", keep=1),
    "ProgressBar": lambda: ProgressBar(Every(steps=1)),
    "LogVariables": lambda: LogVariables(),
    "FinalValues": lambda: FinalValues(lambda: {"one": 1.0}),
    "Throughput": lambda: Throughput(4, every=Every(steps=2)),
    "System": lambda: System(every=Every(steps=2)),
    "Profile": lambda: Profile(Every(steps=2), steps=1, keep=1),
    "a function after steps": lambda: FunctionService(Moment.AFTER_STEP, looks, 2, "mine"),
    "a function after epochs": lambda: FunctionService(Moment.AFTER_EPOCH, looks, None, "mine"),
    "a function before steps": lambda: FunctionService(Moment.BEFORE_STEP, looks, None, "mine"),
}


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_services_pass(name: str) -> None:
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


class Draws(Counting):
    isolate = False

    def run(self, boundary: everstep.Boundary) -> Outcome | None:
        random.random()
        return super().run(boundary)


class DrawsWhenOpened(Counting):
    isolate = False

    def open(self, run: Any) -> None:
        np.random.rand()


class Meddles(Counting):
    def open(self, run: Any) -> None:
        run.max_step = 3


class Forgets(Counting):
    def state_dict(self) -> Any:
        return None


class ForgetsAndStops(Forgets):
    controller = True
    stage = Stage.DECIDE

    def run(self, boundary: everstep.Boundary) -> Outcome | None:
        self.runs += 1
        return Outcome(actions=(Stop("enough"),)) if self.runs == 4 else None


class LeaksAThread(Counting):
    done: ClassVar[threading.Event] = threading.Event()

    def open(self, run: Any) -> None:
        self.done.clear()
        threading.Thread(target=self.done.wait, daemon=True, name="leaked").start()


class LeaksAFile(Counting):
    files: ClassVar[list[Any]] = []

    def open(self, run: Any) -> None:
        self.files.append(Path(__file__).open())  # noqa: SIM115


class Numbered(Counting):
    numbers = count()

    def __init__(self) -> None:
        super().__init__()
        self.name = f"number {next(self.numbers)}"


class Undecided(Counting):
    def due(self, when: Any) -> bool:
        self.runs += 1
        return self.runs % 2 == 0


class WrongMoments(Counting):
    moments = [Moment.AFTER_STEP]  # type: ignore[assignment]  # noqa: RUF012


class NeverDue(Counting):
    def due(self, when: Any) -> bool:
        return False


class Unchecked(Counting):
    def __init_subclass__(cls) -> None:
        pass


class TakesAnything(Unchecked):
    def __init__(self, **options: Any) -> None:
        super().__init__()


class ForgetsToInitialize(Service):
    def __init__(self) -> None:
        self.metric = "loss"

    def run(self, boundary: everstep.Boundary) -> Outcome | None:
        return None


class SetsWhatItDoesNotDeclare(Counting):
    controller = True
    stage = Stage.DECIDE

    def run(self, boundary: everstep.Boundary) -> Outcome | None:
        return Outcome(actions=(everstep.SetValue("optimizer.lr", times=0.9),))


class SetsWhatItDeclares(SetsWhatItDoesNotDeclare):
    sets = ("optimizer.lr",)


FAULTS = [
    (Draws, "an observer must change nothing.*rng/rank0/python"),
    (DrawsWhenOpened, "an observer must change nothing"),
    (Meddles, "an observer must change nothing.*progress"),
    (Forgets, "interrupted in step 1 and started again: .*counting/values/runs.*hold all that run"),
    (ForgetsAndStops, "interrupted in step 1 and started again: .*progress"),
    (LeaksAThread, "threads outlive the block: leaked"),
    (LeaksAFile, "still open: .*test_check_service"),
    (Numbered, "two services are called 'number 0', 'number 1'"),
    (Undecided, "two answers"),
    (WrongMoments, "frozenset"),
    (NeverDue, "never ran"),
    (TakesAnything, "unknown keyword"),
]


class TellsALength(Service):
    """Correct: its metric is not a time, and stands in the window of the epoch's line at the end."""

    def __init__(self) -> None:
        super().__init__("length", Every(epochs=1))

    def run(self, boundary: everstep.Boundary) -> Outcome | None:
        return Outcome({"length": 2.0})


class RestsBelow(Service):
    """Correct: stops when a metric has rested for two epochs."""

    stage = Stage.DECIDE
    controller = True

    def __init__(self, metric: str = "valid_loss") -> None:
        super().__init__("rests", Every(epochs=1))
        self.metric, self.last, self.times = metric, -1.0, 0
        self.watches = (metric,)

    def run(self, boundary: everstep.Boundary) -> Outcome | None:
        values = boundary.readings.values(self.metric)
        boundary.readings.clear()
        self.times = self.times + 1 if values and values[-1] == 0.5 else 0
        return Outcome(actions=(Stop("rests"),)) if self.times == 2 else None

    def state_dict(self) -> Any:
        return {"times": self.times}

    def load_state_dict(self, state: Any) -> None:
        self.times = state["times"]


class RestsAndForgets(RestsBelow):
    def load_state_dict(self, state: Any) -> None:
        pass


class ActsWithoutState(Service):
    stage = Stage.DECIDE
    controller = True

    def __init__(self) -> None:
        super().__init__("acts", Every(epochs=1))

    def run(self, boundary: everstep.Boundary) -> Outcome | None:
        stats = boundary.readings.stats("valid_loss")
        boundary.readings.clear()
        return Outcome(actions=(Stop("low"),)) if stats and stats.mean < 0.1 else None


LOW = {"valid_loss": [0.05, 0.05, 0.05]}
RESTS = {"valid_loss": [1.0, 0.5, 0.5]}


@pytest.mark.campaign("long")
def test_a_condition_that_never_comes_true_is_told() -> None:
    with pytest.raises(AssertionError, match=r"'rests' was \{'times': 0\} at each boundary.*values="):
        check_service(RestsAndForgets)
    with pytest.raises(AssertionError, match=r"'acts' returned no action.*values="):
        check_service(ActsWithoutState)
    check_service(ActsWithoutState, values=LOW)
    check_service(RestsBelow, values=RESTS)
    with pytest.raises(AssertionError, match="does its state_dict hold all"):
        check_service(RestsAndForgets, values=RESTS)


def test_values_of_another_number_are_told() -> None:
    with pytest.raises(AssertionError, match=r"'loss': \[1.0\]\}: give 6 values, one for each step"):
        check_service(RestsBelow, values={"loss": [1.0]})


def test_a_watched_metric_without_values_is_told() -> None:
    with pytest.raises(AssertionError, match=r"watches 'valid_los', which has no values.*'valid_loss'"):
        check_service(lambda: RestsBelow("valid_los"))


@pytest.mark.campaign("long")
@pytest.mark.parametrize("kind", [Counting, SetsWhatItDeclares, TellsALength])
def test_a_correct_service_passes(kind: type[Service]) -> None:
    check_service(kind)


def test_a_target_that_is_not_declared_is_refused() -> None:
    with pytest.raises(everstep.errors.UsageError, match=r"sets = \('optimizer.lr',\)"):
        check_service(SetsWhatItDoesNotDeclare)


def test_a_service_that_is_not_initialized_is_named(tmp_path: Path) -> None:
    message = r"ForgetsToInitialize.__init__ does not call super\(\).__init__\(\)"
    with pytest.raises(everstep.errors.ConfigError, match=message):
        check_service(ForgetsToInitialize)
    with pytest.raises(everstep.errors.ConfigError, match=message):
        everstep.Supervisor(tmp_path / "run", services=[ForgetsToInitialize()])


def test_a_wrong_schedule_is_named_as_it_was_given() -> None:
    with pytest.raises(everstep.errors.ConfigError, match="schedule=3 of service 's'"):
        Service("s", schedule=3)  # type: ignore[arg-type]
    with pytest.raises(everstep.errors.ConfigError, match="every=3 of service 'best loss'"):
        everstep.Best("loss", every=3)  # type: ignore[arg-type]


class DrawsIsolated(DrawsWhenOpened):
    isolate = True


@pytest.mark.campaign("long")
def test_random_numbers_drawn_by_an_isolated_service_are_put_back() -> None:
    check_service(DrawsIsolated)


@pytest.mark.campaign("long", gate=6)
@pytest.mark.parametrize(("kind", "message"), FAULTS)
def test_each_fault_is_found(kind: type[Counting], message: str) -> None:
    try:
        with pytest.raises(AssertionError, match=message):
            check_service(kind)
    finally:
        LeaksAThread.done.set()
        while LeaksAFile.files:
            LeaksAFile.files.pop().close()


def test_a_service_without_arguments_of_its_own_refuses_unknown_ones_too() -> None:
    class Plain(Service):
        pass

    with pytest.raises(everstep.errors.ConfigError, match="'nmae'; did you mean 'name'"):
        Plain(nmae="x")  # type: ignore[call-arg]


class Reports(Counting):
    """Its metric depends on how often the process was started, which is no part of the run."""

    stage = Stage.REPORT

    def open(self, run: Any) -> None:
        self.segment = run.segment

    def run(self, boundary: everstep.Boundary) -> Outcome | None:
        return Outcome({"segment": self.segment})


def test_a_row_that_depends_on_the_start_is_found() -> None:
    with pytest.raises(AssertionError, match="counting/values/segment"):
        check_service(Reports)


@pytest.mark.campaign("long")
def test_a_metric_of_ones_own_is_collected_on_request() -> None:
    seen: list[float] = []

    class Watches(Counting):
        def open(self, run: Any) -> None:
            run.watch("bleu", seen.append)

    check_service(Watches, metrics=["bleu"])
    assert seen


def test_a_failing_save_is_armed_for_a_block_only(tmp_path: Path) -> None:
    def train(run: str) -> everstep.Ending:
        with everstep.Supervisor(tmp_path / run, max_step=2, default_services=False) as sv:
            batches = sv.stream(everstep.data.arrays(np.arange(4), batch_size=1))
            while not sv.should_stop():
                next(batches)
                sv.advance()
        return sv.ending

    with (
        armed("ENOSPC:checkpoint.rename:1"),
        pytest.raises(everstep.errors.CheckpointError, match="trial save"),
    ):
        train("full")
    assert train("later").finished


def test_nothing_left_passes_where_all_is_given_back() -> None:
    with nothing_left():
        Path(__file__).read_text()


def test_a_service_instead_of_a_function_is_told() -> None:
    with pytest.raises(AssertionError, match=r"check_service\(lambda: Counting\(\.\.\.\)\)"):
        check_service(Counting())  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------- sinks

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
}


@pytest.mark.campaign("long")
@pytest.mark.parametrize("name", SINKS)
def test_built_in_sinks_hold_what_the_journal_holds(name: str) -> None:
    check_sink(*SINKS[name])


@pytest.mark.campaign("long")
def test_a_sink_that_leaves_out_rows_says_which() -> None:
    check_sink(lambda: CSV(metrics=["loss"]), table, takes=lambda row: row.name == "loss")


class Plain(Sink):
    """Correct: a JSON object per line."""

    def write(self, file: IO[Any], items: Iterable[Any]) -> None:
        for line in self.lines(items):
            file.write(json.dumps(line) + "\n")


class DropsEarlierStarts(Plain):
    def begin(self, older: Any) -> None:
        super().begin(iter(()))


class WritesTwice(Plain):
    def write(self, file: IO[Any], items: Iterable[Any]) -> None:
        items = list(items)
        super().write(file, items)
        super().write(file, items)


class KeepsSupersededRows(Plain):
    """Appends to the file of the start before, whatever a resume has superseded."""

    def begin(self, older: Any) -> None:
        self._file = open(self.path, "a")  # noqa: SIM115


class Rounds(Plain):
    def write(self, file: IO[Any], items: Iterable[Any]) -> None:
        for line in self.lines(items):
            file.write(json.dumps({n: round(v, 2) if n == "loss" else v for n, v in line.items()}) + "\n")


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            DropsEarlierStarts,
            "interrupted in step 1 and started again, .*'loss' at step 1 it has .*earlier starts",
        ),
        (WritesTwice, "undisturbed, .*'loss' at step 1 it has .*write each row once"),
        (KeepsSupersededRows, "started again, .*superseded"),
        (Rounds, "undisturbed, .*each value as it is"),
    ],
)
def test_a_broken_sink_is_found(kind: Callable[[str], Sink], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_sink(lambda: kind("logs/metrics.jsonl"), json_lines)


@pytest.mark.campaign("long")
def test_a_sink_of_one_method_passes() -> None:
    check_sink(lambda: Plain("logs/metrics.jsonl"), json_lines)
