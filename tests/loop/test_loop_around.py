"""What a TrainLoop does around the steps, and what a newcomer gets wrong: a loop that gets nowhere, say."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep import Best, Boundary, Checkpoints, EarlyStop, Every, Service
from everstep.errors import Interrupted, ProgressError, StateError, UsageError
from everstep.record import RunJournal, failures
from everstep.services import HangWatch
from everstep.services.recovery import HALF_AN_HOUR
from everstep.supervisor.checks import sanity_checks
from everstep.testing import ManualClock, nothing_left
from tiny_runs import Boom, Tiny, events, quiet, supervised
from tiny_task import slow_data
from waiting import until


def test_a_time_budget_is_noticed_without_any_service_due(tmp_path: Path) -> None:
    """The timer thread wakes a loop in which nothing else would."""
    loop = everstep.TrainLoop(tmp_path, max_time=0.05, max_step=1 << 40, default_services=False)

    def train() -> None:
        with loop:
            for _ in loop.iter_epochs():
                for _ in loop.iter_steps():
                    pass

    with nothing_left(), pytest.raises(Interrupted, match=r"0\.05 s is used up") as raised:
        train()
    assert raised.value.code == 3  # after no step where the start takes that long


class Ticks(Service):
    """Notes the steps at which it ran, and who else lives then."""

    def __init__(self) -> None:
        super().__init__("ticks", Every(seconds=10))
        self.ran: list[int] = []
        self.threads: set[str] = set()

    def run(self, boundary: Boundary) -> None:
        self.ran.append(boundary.step)
        self.threads |= {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("door", ["supervised", "looped"])
@pytest.mark.parametrize(("seconds", "first"), [(4.0, [3, 6, 9]), (0.0, [])])
def test_a_clock_of_ones_own_drives_schedules(tmp_path: Path, door: Any, seconds: float, first: Any) -> None:
    """At the very step at which its time has come: no thread looks at it, and no other service is due."""
    ticks, clock = Ticks(), ManualClock()
    arguments: dict[str, Any] = {"services": [ticks], "clock": clock}
    if door == "looped":
        tiny = Tiny(tmp_path, samples=20, max_epoch=1, **arguments)
        tiny.train(inside=lambda loop, step: clock.advance(seconds))
    else:
        sv = everstep.Supervisor(tmp_path, max_step=10, **arguments)
        supervised(sv, lambda sv: clock.advance(seconds))
    assert ticks.ran[:3] == first
    assert "everstep-timer" not in ticks.threads


def test_the_parts_of_the_time_sum_to_the_whole(tmp_path: Path) -> None:
    clock = ManualClock()
    seen: dict[str, Any] = {}
    with everstep.TrainLoop(tmp_path / "run", {"a": []}, max_epoch=2, clock=clock) as loop:
        loop.on("TIME_METRIC_STATS_PRINTED", lambda boundary: seen.update(boundary.payload))
        for _ in loop.iter_epochs():
            for _ in loop.iter_steps(everstep.data.replay(slow_data(clock, 0.25))):
                clock.advance(1.0)
            with loop.evaluation(), loop.timeit("valid_time"):
                clock.advance(3.0)
            loop.print_logs()
    sums = {name: stats.mean * stats.count for name, stats in seen.items()}
    assert sums == {"step_time": 4.0, "valid_time": 3.0, "epoch_time": 8.0}
    times = [(t["epoch"], t["steps"], t["seconds"], t["data_wait"]) for t in events(loop.run_dir, "times")]
    assert times == [(1, [1, 4], 8.0, 1.0), (2, [5, 8], 8.0, 1.0)]


def test_a_save_that_is_asked_for_in_a_step_or_a_tail_is_one_with_a_save_that_is_due(tmp_path: Path) -> None:
    def ask(loop: Any, step_or_epoch: int) -> None:
        if step_or_epoch in (1, 6, 7):
            loop.make_checkpoint()

    announced: list[str] = []
    saves = Checkpoints(Every(steps=2) | everstep.At(2, 6), keep_last=None)
    tiny = Tiny(tmp_path / "run", samples=10, max_epoch=2, services=[saves])
    tiny.loop.on("AFTER_CHECKPOINT", lambda boundary: announced.append(boundary.payload))
    tiny.train(inside=ask, tail=ask)
    written = Counter(event["name"] for event in events(tmp_path / "run", "checkpoint"))
    assert set(written.values()) == {1} and set(announced) <= written.keys()
    ends = [f"epoch-000{epoch}-step-{5 * epoch:08d}" for epoch in range(3)]
    assert sorted(written) == [*ends, *(f"step-{step:08d}" for step in (1, 2, 4, 6, 7, 8))]


def test_without_a_console_lines_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with everstep.TrainLoop(tmp_path / "run", max_epoch=1, default_services=False, show_eta=False) as loop:
        for _ in loop.iter_epochs():
            for _ in loop.iter_steps([1.0]):
                loop.collect_metrics(loss=0.5)
                loop.println("hello", with_tag=True)
            loop.print_logs()
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "[Step 1] hello"
    assert out[1].startswith("[Step 1] loss: 0.5; epoch time: ")
    assert out[2] == "ended: max_epoch 1 is reached (step 1, finished)"


def train_linear(run: Path, names: str, *, step: bool = True) -> None:
    """The state has a share of these: model, second (of which `optimizer` has parameters, too), optimizer."""
    model, second = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    trained = [*model.parameters(), *(second.parameters() if "two" in names else ())]
    entries = {"model": model, "second": second, "optimizer": torch.optim.SGD(trained, lr=0.1)}
    state = {name: entries[name] for name in names.split() if name != "two"}
    with everstep.TrainLoop(run, state, max_epoch=2) as loop:
        for _ in loop.iter_epochs():
            for _, batch in loop.iter_steps([torch.ones(1, 2)] * 3):
                model(batch).sum().backward()
                if step:
                    entries["optimizer"].step()


def test_an_optimizer_that_never_steps_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProgressError, match=r"3 steps .* call optimizer\.step\(\)"):
        train_linear(tmp_path / "run", "model optimizer", step=False)


LACKING: dict[str, str] = {
    "model": r"SGD .* add it",
    "": "SGD of arrays that are not in the state",
    "optimizer": r"parameter 0 \(1, 2\) of 'optimizer'.* add the model",  # else old moments of a new model
    "two model optimizer": r"parameter 2 \(1, 2\) of 'optimizer'.* add the model",
}


@pytest.mark.parametrize(("names", "message"), LACKING.items())
def test_an_optimizer_that_the_state_lacks_is_an_error(tmp_path: Path, names: str, message: str) -> None:
    with pytest.raises(StateError, match=message):
        train_linear(tmp_path / "run", names)


def collecting(**values: float) -> Any:
    """A tail that collects these; more metrics come as more keywords."""
    return lambda loop, epoch: loop.collect_metrics({name: value / epoch for name, value in values.items()})


@pytest.mark.parametrize("given", [[Best("valid_loss")], [Best("valid_loss"), Best("valid_acc", save=False)]])
def test_a_watched_metric_is_the_runs_best_beside_other_best_services(tmp_path: Path, given: Any) -> None:
    def tail(loop: Any, epoch: int) -> None:
        collecting(valid_loss=1.0, valid_acc=0.5)(loop, epoch)
        loop.print_logs()

    tiny = Tiny(tmp_path / "run", max_epoch=2, watch=("valid_acc", "max"), services=given).train(tail=tail)
    assert tiny.loop.best_valid_metric == 0.5 and tiny.loop.ending.best.metric == "valid_acc"
    first = next(line for line in tiny.lines if "valid acc" in line)
    assert first.count(" (*)") == 2
    assert (tmp_path / "run" / "best" / "valid_loss").is_dir()


WATCHING = {
    "early stop": {"services": [EarlyStop("val_loss", patience=1)]},
    "best": {"services": [Best("val_loss")]},
    "watch": {"watch": "val_loss"},
    "keep_best": {"services": [Checkpoints(keep_best=("val_loss", "min", 2))]},
    "all": {"watch": "val_loss", "services": [EarlyStop("val_loss", patience=1)]},
}


@pytest.mark.parametrize("arguments", WATCHING.values(), ids=WATCHING)
def test_a_name_like_a_collected_one_is_said_after_the_first_epoch(tmp_path: Path, arguments: Any) -> None:
    tiny = Tiny(tmp_path / "run", max_epoch=3, **arguments)
    told = []

    def tail(loop: Any, epoch: int) -> None:
        told.append(any("no value of" in line for line in tiny.lines))
        loop.collect_metrics(valid_loss=1 / epoch, train_loss=1.0)

    (warning,) = tiny.train(tail=tail).loop.ending.warnings
    assert warning.endswith(": no value of 'val_loss'; did you mean 'valid_loss'?")
    assert told == [False, True, True]
    assert tiny.lines.count(f"warning: {warning}") == 1


def test_a_name_like_no_other_is_said_at_the_end_of_each_start_that_trains(tmp_path: Path) -> None:
    services = [EarlyStop("nope", "min", patience=1, name="stopper")]
    wanted = ("'stopper': no value of 'nope'; known: loss, valid_loss",)
    for max_epoch, warnings in ((2, wanted), (3, wanted), (3, ())):
        tiny = Tiny(tmp_path / "run", max_epoch=max_epoch, services=services)
        assert tiny.train(tail=collecting(valid_loss=1.0)).loop.ending.warnings == warnings


def test_a_checkpoint_is_not_ranked_by_a_value_that_is_older_than_it(tmp_path: Path) -> None:
    found = {1: 0.1, 3: 0.5}

    def tail(loop: Any, epoch: int) -> None:
        if epoch in found:
            loop.collect_metrics(valid_loss=found[epoch])

    for max_epoch in (2, 5):
        saves = Checkpoints(everstep.Every(epochs=1), keep_last=1, keep_best=("valid_loss", "min", 2))
        Tiny(tmp_path, max_epoch=max_epoch, services=[saves]).train(tail=tail)
    kept = {path.name.partition("-step")[0] for path in (tmp_path / "checkpoints").glob("epoch-*")}
    assert kept == {"epoch-0001", "epoch-0003", "epoch-0005"}


@pytest.mark.parametrize("services", [[], [EarlyStop("loss", patience=9)]])
def test_what_nobody_asked_for_or_comes_in_steps_is_not_missed(tmp_path: Path, services: Any) -> None:
    tiny = Tiny(tmp_path / "run", max_epoch=2, services=services).train(tail=collecting(valid_los=1.0))
    assert tiny.loop.ending.warnings == ()


def test_nothing_to_restore_is_said(tmp_path: Path) -> None:
    services = [Best("val_acc", restore_at_end=True)]
    tiny = Tiny(tmp_path / "run", max_epoch=1, services=services).train()
    assert tiny.loop.ending.warnings == (
        "'best val_acc': no value of 'val_acc'; known: loss",
        "'best val_acc': restore_at_end restored nothing: there is no value of it; the last weights stay",
    )


class Net:
    """The smallest training with torch: weights, their optimizer, one update."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def train(self, run_dir: Path, body: Callable[[Any], object]) -> everstep.TrainLoop:
        """One epoch of two steps, and then `body`."""
        with everstep.TrainLoop(run_dir, self.state, max_epoch=1) as loop:
            for _ in loop.iter_epochs():
                for _ in loop.iter_steps([1, 2]):
                    self.update()
                body(loop)
        return loop

    def update(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 1)).sum().backward()
        self.optimizer.step()


def test_an_epoch_that_trains_without_iter_steps_is_an_error(tmp_path: Path) -> None:
    net = Net()
    wanted = r"in epoch 1 .* made 3 updates and no step was counted; .*loop\.iter_steps\(data\)"

    def without_steps() -> None:
        with everstep.TrainLoop(tmp_path / "run", net.state, max_epoch=2) as loop:
            for _ in loop.iter_epochs():
                for _ in range(3):
                    net.update()

    with pytest.raises(ProgressError, match=wanted):
        without_steps()


def test_an_optimizer_step_inside_evaluation_is_an_error(tmp_path: Path) -> None:
    net = Net()

    def trains(loop: Any, error: Any = None) -> None:
        with loop.evaluation(grad=True):
            net.update()
            if error:
                raise error

    with pytest.raises(Boom):
        net.train(tmp_path / "boom", lambda loop: trains(loop, Boom()))
    with pytest.raises(UsageError, match=r"inside evaluation\(\) \(2 updates before the block, 3 after\)"):
        net.train(tmp_path / "run", trains)


def test_a_second_step_loop_over_other_data_is_said_once(tmp_path: Path) -> None:
    train, valid = [1, 2, 3], [4]
    for max_epoch in (2, 3):
        tiny = Tiny(tmp_path / "run", max_epoch=max_epoch)
        with tiny.loop as loop:
            for _ in loop.iter_epochs():
                list(loop.iter_steps(train))
                list(loop.iter_steps(valid))
        (warning,) = loop.ending.warnings
        assert "reads other data as stream 'train': its steps count as training steps" in warning
        assert "with loop.evaluation(): for x, y in valid:" in warning and 'name="train2"' in warning


def test_data_made_anew_or_read_twice_or_named_is_no_second_data(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path / "run", max_epoch=4)
    with tiny.loop as loop:
        for epoch in loop.iter_epochs():
            train = [epoch, epoch + 1]
            for _ in range(2):
                list(loop.iter_steps(train))
            list(loop.iter_steps([epoch], name="other"))
    assert loop.step == 20 and loop.ending.warnings == ()


class Lazy(everstep.Task):
    def train_step(self, batch: Any) -> dict[str, float]:
        return {}


Each = Callable[[Any, Any], object]


def supervise(run_dir: Path, each: Each, data: Any = None, state: Any = None) -> everstep.Supervisor:
    """A loop without advance(); `each` is called with the Supervisor and its batches."""
    with quiet(run_dir, state or {"w": np.zeros(3)}, max_step=5) as sv:
        batches = sv.stream(data)
        while not sv.should_stop():
            each(sv, batches)
    return sv


def update_without_advance(run_dir: Path) -> None:
    net = Net()
    supervise(run_dir, lambda sv, batches: net.update(), state=net.state)


def epochs(tiny: Tiny, each: Each = lambda loop, epoch: None) -> Any:
    with tiny.loop as loop:
        for epoch in loop.iter_epochs():
            each(loop, epoch)
    return loop


def only_ask(tiny: Tiny, each: Callable[[], object] = lambda: None) -> None:
    with tiny.loop as loop:
        while not loop.should_stop():
            each()


def lazy_epochs(run_dir: Path) -> None:
    with everstep.Trainer(Lazy(), {"train": [1, 2]}, run_dir, max_step=5).open() as loop:
        list(loop.iter_epochs())  # without trainer.epoch()


# "[\d,]+,000": a process that gets less than a tenth of a core counts as one that waits, and is judged later
STUCK: dict[str, tuple[Callable[[Path], object], str]] = {
    "updates": (update_without_advance, r"advance\(\) was not called in 1,000 rounds .* made 998 updates"),
    "nothing": (
        lambda path: supervise(path, lambda sv, batches: np.ones(3).sum()),
        r"advance\(\) was not called in [\d,]+,000 rounds .*did not wait; call it",
    ),
    "batches": (
        lambda path: supervise(path, lambda sv, batches: next(batches), [1, 2, 3]),
        "rounds of the loop, each of which drew a batch",
    ),
    "asks": (
        lambda path: only_ask(Tiny(path, max_epoch=2)),
        r"no step and no epoch was completed in [\d,]+,000.*iter_epochs",
    ),
    "epochs": (lambda path: epochs(Tiny(path)), "in 100 epochs in a row, and max_epoch is not set"),
    "epochs to a step": (lambda path: epochs(Tiny(path, max_step=5)), "in 100 epochs in a row"),
    "trainer": (lazy_epochs, "in 100 epochs in a row"),
}


@pytest.mark.parametrize(("call", "words"), STUCK.values(), ids=STUCK)
def test_a_loop_going_nowhere_is_an_error(tmp_path: Path, monkeypatch: Any, call: Any, words: str) -> None:
    monkeypatch.setattr(sanity_checks, "WORKING", 1_000)
    monkeypatch.setattr(sanity_checks, "BUSY", 2_000)
    with pytest.raises(ProgressError, match=words):
        call(tmp_path)


def test_should_stop_may_be_asked_often(tmp_path: Path) -> None:
    """Also between the many updates of a critic in one step."""
    net = Net()
    with quiet(tmp_path / "run", net.state, max_step=7) as sv:
        sv.stream(None)
        while not sv.should_stop():
            for _ in range(150):
                net.update()
                sv.should_stop()
            sv.advance()
        for _ in range(250):  # where nothing trains it may be asked for ever
            assert sv.should_stop()
    assert (sv.step, sv.updates) == (7, 1050)


def terminate(*_: Any, number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def test_a_signal_ends_a_loop_that_gets_nowhere_at_once(tmp_path: Path) -> None:
    rounds: list[Any] = []

    def work(sv: Any, batches: Any) -> None:
        rounds.append(sv)
        if len(rounds) == 10:
            terminate(number=signal.SIGINT)

    with pytest.raises(Interrupted) as left:
        supervise(tmp_path / "supervisor", work)
    assert left.value.code == 128 + signal.SIGINT and len(rounds) == 10
    assert not rounds[0].ending.finished and rounds[0].step == 0
    tiny = Tiny(tmp_path / "epochs")
    with pytest.raises(Interrupted):
        epochs(tiny, lambda loop, epoch: terminate() if epoch == 3 else None)
    assert tiny.loop.epoch == 3
    with pytest.raises(Interrupted):
        only_ask(Tiny(tmp_path / "asks"), terminate)


def test_a_loop_that_asks_inside_its_steps_completes_the_step_before_a_signal_ends_it(tmp_path: Path) -> None:
    def step(sv: Any, batches: Any) -> None:
        for part in range(5):
            assert not sv.should_stop()
            if sv.step == 2 and part == 1:
                terminate()
        sv.advance()

    with pytest.raises(Interrupted):
        supervise(tmp_path, step)
    assert (tmp_path / "checkpoints" / "step-00000003").is_dir()


def test_who_waits_and_other_threads_may_ask_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanity_checks, "WORKING", 100)
    monkeypatch.setattr(sanity_checks, "BUSY", 100)
    clock = ManualClock()
    times = SimpleNamespace(monotonic=clock, thread_time=lambda: clock() / 20)
    monkeypatch.setattr(sanity_checks, "time", times)
    asked: list[int] = []
    threads: list[threading.Thread] = []

    def wait(sv: Any, batches: Any) -> None:
        if not asked:
            threads.append(threading.Thread(target=lambda: [sv.should_stop() for _ in range(1000)]))
            threads[0].start()
        asked.append(1)
        clock.advance(0.002)
        if len(asked) % 150 == 0:
            sv.advance()

    assert supervise(tmp_path, wait).ending.finished and len(asked) == 750
    threads[0].join()


def test_a_hang_is_noticed_and_the_run_goes_on(tmp_path: Path) -> None:
    """Also where a machine is so slow that other steps are taken for hangs."""
    run_dir = tmp_path / "run"

    def noticed() -> list[Any]:
        return [page for page in failures(run_dir) if any("stuck_here" in line for line in page.lines)]

    def stuck_here(loop: Any, step: int) -> None:
        if step == 3:
            until(noticed)

    with nothing_left():
        tiny = Tiny(run_dir, max_epoch=1, services=[HangWatch(0.1)]).train(stuck_here)
    page, ending = noticed()[0], tiny.loop.ending
    assert (page.kind, page.step, page.cause) == ("hang", 2, None)
    assert page.what.startswith("the loop has not moved for 0.1 s; the main thread is in ")
    assert ending.finished and any(page.what in each for each in ending.warnings)
    assert page.what in [event.data["what"] for event in RunJournal(run_dir).events("hang")]


def test_every_run_has_a_watch_that_warns_after_half_an_hour(tmp_path: Path) -> None:
    for default, watches in ((True, True), (False, False)):
        with everstep.TrainLoop(tmp_path / str(default), max_epoch=1, default_services=default):
            names = [thread.name for thread in threading.enumerate()]
        assert ("everstep-hang-watch" in names) is watches
    assert (HangWatch().after, HangWatch().then, HALF_AN_HOUR) == (None, "warn", 1800)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """A collection between an object's making and the look at young objects would make it an old one."""
    gc.disable()
    yield
    gc.enable()


AROUND: list[tuple[Any, str | None]] = [
    (enumerate, "use loop.batch_index, or step"),
    (lambda steps: islice(steps, 2), "it counts its batches from 0 again; use steps_per_epoch="),
    (lambda steps: zip(range(9), steps, strict=False), "whose __iter__ yields zip(a, b)"),
    (lambda steps: (each for each in enumerate(steps)), "use loop.batch_index, or step"),
    (lambda steps: (each for each in steps), None),
]


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(("around", "remedy"), AROUND)
def test_what_counts_around_steps_is_named_once_in_a_run(tmp_path: Path, around: Any, remedy: Any) -> None:
    """`islice` would lengthen the epoch that a resume enters in its middle, and nothing else would tell."""
    told = []
    for max_epoch in (2, 3):
        tiny = Tiny(tmp_path / "run", max_epoch=max_epoch)
        with tiny.loop as loop:
            for _ in loop.iter_epochs():
                for _ in around(loop.iter_steps([1, 2, 3])):
                    pass
        told += loop.ending.warnings
    assert len(told) == (remedy is not None)
    for warning in told:
        assert "() around loop.iter_steps(): its place is not saved" in warning and remedy in warning


def test_the_length_of_a_step_loop_counts_the_steps_that_this_process_has_before_it(tmp_path: Path) -> None:
    def train(data: Any, fails_in: int = -1, folder: str = "run", **limits: int) -> list[int]:
        lengths = []
        services = [Checkpoints(Every(steps=1))]
        with everstep.TrainLoop(tmp_path / folder, {}, services=services, **limits) as loop:
            for _ in loop.iter_epochs():
                steps = loop.iter_steps(data)
                lengths.append(len(steps))
                for _ in steps:
                    if loop.step == fails_in:
                        raise Boom
        return lengths

    with pytest.raises(Boom):
        train([1, 2, 3, 4], fails_in=6, max_epoch=3)
    assert train([1, 2, 3, 4], max_epoch=3) == [3, 4]  # on from the middle of epoch 2
    loader = torch.utils.data.DataLoader(range(10), batch_size=3)  # type: ignore[arg-type]
    assert train(loader, folder="loader", max_epoch=1) == [4]
    assert train(None, folder="limits", max_step=7, steps_per_epoch=5) == [5, 2]
    with pytest.raises(TypeError, match="has no length, and no limit of steps is set"):
        train(iter([1, 2]), folder="iterator", max_epoch=1)
