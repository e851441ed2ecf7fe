"""Law 7: no thread, file handle, lock, signal handler or hook outlives the `with` block, however it ends."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

import everstep
from everstep import Every
from everstep.contracts.services import Interrupt
from everstep.errors import EverstepError, Interrupted
from everstep.record import RunLock
from everstep.testing import armed, nothing_left
from tiny_runs import Boom
from waiting import PATIENCE

Disturb = Callable[[Any, int], object]


@contextmanager
def nothing_at_all_left(run_dir: Path, workers: int = 0) -> Iterator[None]:
    """Besides what `nothing_left` sees: worker processes, torch's hooks, Python's own, and the lock."""
    streams = (sys.stdout, sys.stderr, sys.excepthook)
    hooks = set(torch_optimizer._global_optimizer_post_hooks)
    # torch closes the queues to its workers without waiting for the threads that feed them
    with nothing_left(settle=PATIENCE if workers else 0.0):
        yield
        gc.collect()  # torch leaves the pipes of workers that have ended to the garbage collector
    assert multiprocessing.active_children() == []
    assert set(torch_optimizer._global_optimizer_post_hooks) == hooks
    assert (sys.stdout, sys.stderr, sys.excepthook) == streams
    lock = RunLock(run_dir)
    lock.acquire()
    lock.release()


def make_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}


class Samples(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        return torch.full((3,), float(index))


def make_data(workers: int) -> Any:
    return everstep.data.loader(Samples(range(12)), 4, num_workers=workers)


def services(metric: str, every: everstep.Schedule) -> list[everstep.Service]:
    saves = everstep.Checkpoints(Every(steps=2) | Every(seconds=600))
    judges = [everstep.Best(metric, every=every), everstep.EarlyStop(metric, patience=9, every=every)]
    return [saves, *judges, everstep.services.StopAfter(seconds=900)]


def update(state: dict[str, Any], batch: Any) -> Any:
    loss = state["model"](batch).square().mean()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    return loss


def train_loop(run_dir: Path, disturb: Disturb, workers: int) -> None:
    state, options = make_state(), {"services": services("valid_loss", Every(epochs=1)), "max_epoch": 2}
    data = make_data(workers)
    with everstep.TrainLoop(run_dir, state, **options) as loop:
        loop.loop(60, lambda: None)
        loop.on("AFTER_STEP", lambda boundary: None)
        for epoch in loop.iter_epochs():
            for step, batch in loop.iter_steps(data):
                loop.collect_metrics(loss=update(state, batch))
                disturb(loop, step)
            with loop.evaluation():
                loop.collect_metrics(valid_loss=1 / epoch)
            loop.print_logs()


def supervise(run_dir: Path, disturb: Disturb, workers: int) -> None:
    state = make_state()
    with everstep.Supervisor(run_dir, state, max_step=6, services=services("loss", Every(steps=2))) as sv:
        sv.loop(60, lambda: None)
        batches = sv.stream(make_data(workers))
        while not sv.should_stop():
            loss = update(state, next(batches))
            disturb(sv, sv.step + 1)
            sv.advance(loss=loss)


def leave_by(make: Callable[[], BaseException]) -> Disturb:
    """An error that is made anew: one that lives on would hold the batch, by its traceback."""

    def disturb(loop: Any, step: int) -> None:
        if step == 2:
            raise make()

    return disturb


def at_2(act: Callable[[Any], object]) -> Disturb:
    return lambda loop, step: act(loop) if step == 2 else None


def nothing(loop: Any, step: int) -> None:
    pass


ENDS: dict[str, tuple[Disturb, type[BaseException] | None]] = {
    "nothing": (nothing, None),
    "stop": (at_2(lambda loop: loop.request_stop("for a test")), None),
    "boom": (leave_by(Boom), Boom),
    "leave python": (leave_by(lambda: SystemExit(5)), SystemExit),
    "interrupt": (at_2(lambda loop: loop.call_soon(Interrupt("for a test"))), Interrupted),
    "terminate": (at_2(lambda loop: os.kill(os.getpid(), signal.SIGTERM)), Interrupted),
}


@pytest.mark.campaign("long", gate=6)
@pytest.mark.parametrize("door", [train_loop, supervise])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("disturb", "error"), ENDS.values(), ids=ENDS)
def test_nothing_outlives_the_block(tmp_path: Path, door: Any, workers: int, disturb: Disturb, error) -> None:
    with nothing_at_all_left(tmp_path, workers):
        with pytest.raises(error) if error else nullcontext():
            door(tmp_path, disturb, workers)


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("door", [train_loop, supervise])
@pytest.mark.parametrize("point", ["checkpoint.rename", "journal.fsync", "journal.write"])
def test_nothing_outlives_a_failing_disk(tmp_path: Path, door: Any, point: str) -> None:
    with nothing_at_all_left(tmp_path), armed(f"ENOSPC:{point}:2-99"):
        with pytest.raises(EverstepError):
            door(tmp_path, nothing, 0)


class Fails(everstep.Service):
    def __init__(self, when: str) -> None:
        super().__init__("fails")
        self.when = when

    def open(self, run: Any) -> None:
        if self.when == "open":
            raise Boom

    def close(self) -> None:
        if self.when == "close":
            raise Boom


@pytest.mark.parametrize("kind", [everstep.TrainLoop, everstep.Supervisor])
def test_nothing_outlives_an_entry_that_fails_nor_a_second_holder(tmp_path: Path, kind: Any) -> None:
    def not_ready() -> str:
        return "the queue is not there"

    for arguments in ({"services": [Fails("open")]}, {"ready": not_ready}, {"init_from": tmp_path / "none"}):
        with nothing_at_all_left(tmp_path), pytest.raises((Boom, EverstepError)):
            with kind(tmp_path, make_state(), **arguments):
                raise AssertionError("it was entered")
    with nothing_at_all_left(tmp_path), kind(tmp_path, make_state()):
        with nothing_left(), pytest.raises(everstep.errors.RunLockedError):
            kind(tmp_path, make_state()).__enter__()


def test_all_is_given_back_though_a_service_fails_to_close(tmp_path: Path) -> None:
    with nothing_at_all_left(tmp_path), pytest.raises(everstep.errors.ServiceError, match="'fails': Boom"):
        with everstep.Supervisor(tmp_path, make_state(), services=[Fails("close")]):
            pass


def test_handlers_of_the_users_come_back(tmp_path: Path) -> None:
    def mine(number: int, frame: Any) -> None:
        pass

    before = signal.signal(signal.SIGTERM, mine)
    try:
        supervise(tmp_path, nothing, 0)
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
