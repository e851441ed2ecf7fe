"""A loop that never gets anywhere: an error behind each door, and a signal ends it; who waits may wait."""

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
from everstep.supervisor.checks import no_progress
from everstep.testing import ManualClock
from tiny_runs import Tiny, quiet


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(no_progress, "WORKING", 1_000)
    monkeypatch.setattr(no_progress, "BUSY", 2_000)


def supervise(run_dir: Path, each: Callable[[Any, Any], object], data: Any = None) -> everstep.Supervisor:
    """A loop without advance(); `each` is called with the Supervisor and its batches."""
    with quiet(run_dir, {"w": np.zeros(3)}, max_step=5) as sv:
        batches = sv.stream(data)
        while not sv.should_stop():
            each(sv, batches)
    return sv


def epochs(tiny: Tiny, each: Callable[[Any, int], object] = lambda loop, epoch: None) -> Any:
    with tiny.loop as loop:
        for epoch in loop.iter_epochs():
            each(loop, epoch)
    return loop


def only_ask(tiny: Tiny, each: Callable[[], object] = lambda: None) -> None:
    with tiny.loop as loop:
        while not loop.should_stop():
            each()


@pytest.mark.usefixtures("short_patience")
def test_a_numpy_loop_without_data_that_never_advances(tmp_path: Path) -> None:
    with pytest.raises(
        ProgressError, match=r"advance\(\) was not called in 2,000 rounds .*did not wait; call it"
    ):
        supervise(tmp_path, lambda sv, batches: np.ones(3).sum())


def test_a_loop_that_draws_batches_and_never_advances(tmp_path: Path) -> None:
    with pytest.raises(ProgressError, match="in 10,000 rounds of the loop, each of which drew a batch"):
        supervise(tmp_path, lambda sv, batches: next(batches), [1, 2, 3])


def test_many_updates_of_a_critic_in_one_step_may_ask_between_them(tmp_path: Path) -> None:
    critic, actor = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    learn = torch.optim.SGD([*critic.parameters(), *actor.parameters()], lr=0.1)
    state = {"critic": critic, "actor": actor, "learn": learn}
    with quiet(tmp_path, state, max_step=2) as sv:
        batches = sv.stream([torch.ones(1)] * 50)
        while not sv.should_stop():
            for _ in range(1_500):
                if sv.should_stop():
                    break
                critic(next(batches)).sum().backward()
                learn.step()
            sv.advance()
    assert (sv.ending.finished, sv.updates) == (True, 3_000)


@pytest.mark.usefixtures("short_patience")
def test_a_train_loop_that_asks_and_never_iterates(tmp_path: Path) -> None:
    with pytest.raises(ProgressError, match=r"no step and no epoch was completed in 2,000.*iter_epochs"):
        only_ask(Tiny(tmp_path, max_epoch=2))


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("arguments", [{}, {"max_step": 5}])
def test_epochs_without_a_step_that_may_never_end(tmp_path: Path, arguments: dict[str, Any]) -> None:
    tiny = Tiny(tmp_path, **arguments)
    with pytest.raises(ProgressError, match="in 100 epochs in a row, and max_epoch is not set"):
        epochs(tiny)
    assert tiny.loop.epoch == 100


def test_a_trainer_whose_epochs_have_no_step(tmp_path: Path) -> None:
    class Lazy(everstep.Task):
        def train_step(self, batch: Any) -> dict[str, float]:
            return {}

    trainer = everstep.Trainer(Lazy(), {"train": [1, 2]}, tmp_path, max_step=5)

    def forgetful() -> None:
        with trainer.open() as loop:
            list(loop.iter_epochs())  # without trainer.epoch()

    with pytest.raises(ProgressError, match="in 100 epochs in a row"):
        forgetful()


@pytest.mark.campaign("long")
def test_epochs_without_steps_that_are_meant(tmp_path: Path) -> None:
    counted = epochs(Tiny(tmp_path / "counted", max_epoch=120))
    assert counted.ending.finished and counted.epoch == 120
    asked = epochs(
        Tiny(tmp_path / "asked"), lambda loop, epoch: loop.request_stop("enough") if epoch == 100 else None
    )
    assert asked.ending.finished
    mixed = epochs(
        Tiny(tmp_path / "mixed", max_step=3),
        lambda loop, epoch: list(loop.iter_steps([epoch])) if epoch % 60 == 0 else None,
    )
    assert mixed.epoch == 180


def terminate(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_loop_that_never_advances_at_once(tmp_path: Path, number: int) -> None:
    rounds_made: list[Any] = []

    def work(sv: Any, batches: Any) -> None:
        rounds_made.append(sv)
        if len(rounds_made) == 10:
            os.kill(os.getpid(), number)

    with pytest.raises(Interrupted) as left:
        supervise(tmp_path, work)
    assert left.value.code == 128 + number and len(rounds_made) == 10
    assert not rounds_made[0].ending.finished and rounds_made[0].step == 0


def test_a_signal_ends_epochs_without_steps_and_a_train_loop_that_only_asks(tmp_path: Path) -> None:
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
    monkeypatch.setattr(no_progress, "WORKING", 100)
    monkeypatch.setattr(no_progress, "BUSY", 100)
    clock = ManualClock()
    times = SimpleNamespace(monotonic=clock, thread_time=lambda: clock() / 20)
    monkeypatch.setattr(no_progress, "time", times)
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
