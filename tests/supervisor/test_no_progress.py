"""A loop that gets nowhere: an error behind each door, a signal ends it; and a hang is noticed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep.errors import Interrupted, ProgressError
from everstep.record import RunJournal, failures
from everstep.services import HangWatch
from everstep.services.recovery import HALF_AN_HOUR
from everstep.supervisor.checks import sanity_checks
from everstep.testing import ManualClock, nothing_left
from tiny_runs import Tiny, quiet
from waiting import until


class Net:
    """The smallest training with torch."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def update(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 1)).sum().backward()
        self.optimizer.step()


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


# "\d+,000": a process that gets less than a tenth of a core counts as one that waits, and is judged later
STUCK: dict[str, tuple[Callable[[Path], object], str]] = {
    "updates": (update_without_advance, r"advance\(\) was not called in 1,000 rounds .* made 998 updates"),
    "nothing": (
        lambda path: supervise(path, lambda sv, batches: np.ones(3).sum()),
        r"advance\(\) was not called in \d+,000 rounds .*did not wait; call it",
    ),
    "batches": (
        lambda path: supervise(path, lambda sv, batches: next(batches), [1, 2, 3]),
        "rounds of the loop, each of which drew a batch",
    ),
    "asks": (
        lambda path: only_ask(Tiny(path, max_epoch=2)),
        r"no step and no epoch was completed in \d+,000.*iter_epochs",
    ),
    "epochs": (lambda path: epochs(Tiny(path)), "in 100 epochs in a row, and max_epoch is not set"),
    "epochs to a step": (lambda path: epochs(Tiny(path, max_step=5)), "in 100 epochs in a row"),
    "trainer": (lazy_epochs, "in 100 epochs in a row"),
}


@pytest.mark.parametrize(("call", "words"), STUCK.values(), ids=STUCK)
def test_a_loop_that_gets_nowhere_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Path], object], words: str
) -> None:
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


def test_who_waits_and_other_threads_may_ask_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
