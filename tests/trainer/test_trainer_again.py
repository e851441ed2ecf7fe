"""A Trainer that goes on in one process, with the same objects: as if each start were a new process."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_task import Notes, Own, TinyTask, numbers, trainer
from torch.utils.data import DataLoader, Dataset, TensorDataset

import everstep
from everstep import Every
from everstep.errors import Interrupted, NonFiniteError
from everstep.proof.compare import compare_runs
from everstep.record import RunJournal
from everstep.services import Recovery
from everstep.testing import ManualClock
from gate import share
from tiny_runs import Boom

COUNT = 24
"""Samples: 6 batches a pass."""


class Noisy(Dataset[Any]):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[float]:
        return (index + 0.1 * self.rng.random(),)


def data(kind: str) -> Any:
    samples = TensorDataset(torch.arange(COUNT))
    if kind == "generator":
        return DataLoader(samples, 4, shuffle=True, generator=torch.Generator().manual_seed(5))
    if kind == "dataset's":
        return DataLoader(Noisy(), 4, shuffle=True)
    if kind == "own":
        return Own(6)
    if kind == "prefetched":
        return everstep.data.prefetch(Own(6))
    return DataLoader(samples, 4, shuffle=True, num_workers=1)


KINDS = ("generator", "dataset's", "own", "prefetched", "workers")


class Scheduled(everstep.torch.Task):
    """A learning rate that falls, dropout, and a sample that spoils each batch it is in, from a step on."""

    def __init__(self, bad: int, since: int) -> None:
        super().__init__()
        self.bad, self.since, self.count = bad, since, {"steps": 0}

    def build_model(self) -> Any:
        return torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))

    def build_optimizer(self, model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.decay = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return optimizer

    def state(self) -> Mapping[str, Any]:
        return {**super().state(), "decay": self.decay, "count": self.count}

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        self.count["steps"] += 1
        x = torch.as_tensor(batch[0])[:, None].float() / COUNT
        loss = self.model(x).square().mean()
        if self.count["steps"] >= self.since and bool((torch.as_tensor(batch[0]).int() == self.bad).any()):
            loss = loss * float("nan")
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss}

    def train_loop_end(self) -> None:
        self.decay.step()


def make(run_dir: Path, kind: str, bad: int = -1, since: int = 0, every: int = 1000) -> everstep.Trainer:
    services = [
        Recovery(5),
        everstep.Checkpoints(Every(steps=every)),
        everstep.services.Console(sink=lambda line: None),
    ]
    task = Scheduled(bad, since)
    return everstep.Trainer(task, {"train": data(kind)}, run_dir, services=services, seed=1, max_epoch=3)


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("kind", KINDS)
def test_on_and_on_is_at_once(tmp_path: Path, kind: str) -> None:
    at_once = make(tmp_path / "at once", kind).train(16)
    several = make(tmp_path / "several", kind)
    for steps in (3, 6, 10, 12, 16):  # 6 and 12: where a pass ends
        ending = several.train(steps)
        assert ending.warnings == ()
    assert ending.digest == at_once.digest
    assert compare_runs(tmp_path / "at once", tmp_path / "several") == []


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("since", "every"), [(8, 4), (1, 1000)])  # from where it was saved, and from step 0
def test_after_a_rollback_the_same_objects_are_as_good_as_new_ones(
    tmp_path: Path, kind: str, since: int, every: int
) -> None:
    same = make(tmp_path / "same", kind, 3, since, every).run_training()

    def anew() -> everstep.supervisor.Ending:
        trainer = make(tmp_path / "new", kind, 3, since, every)
        with trainer.open() as loop:
            for _ in loop.iter_epochs():
                trainer.epoch()
        return loop.ending

    new = everstep.recovering(anew)
    assert same.rollbacks == new.rollbacks >= 1
    assert compare_runs(tmp_path / "new", tmp_path / "same") == []


def test_an_exception_before_the_first_save_then_again(tmp_path: Path) -> None:
    """Back at step 0, the generator of the loader stands where the program put it."""
    whole = make(tmp_path / "whole", "generator").run_training()
    broken = make(tmp_path / "broken", "generator")
    step, broken.task.train_step = broken.task.train_step, lambda batch: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        broken.run_training()
    broken.task.train_step = step  # type: ignore[method-assign]
    assert broken.run_training().digest == whole.digest


def test_resume_is_asked_for_until_something_is_saved(tmp_path: Path) -> None:
    for steps in (4, 8):
        trainer(tmp_path, max_epoch=3).train(steps)
    for where, resumed in ((4, "epoch-0001-step-00000004"), (False, None)):
        begun = trainer(tmp_path, max_epoch=3, resume=where)
        with pytest.raises(ZeroDivisionError), begun.open():
            raise ZeroDivisionError
        assert begun.train(8).resumed_from == resumed


def test_a_script_of_two_trainings_that_goes_back_continues_when_it_is_started_again(tmp_path: Path) -> None:
    for steps in (4, 8):
        trainer(tmp_path, max_epoch=3).train(steps)
    for began in "epoch-0001-step-00000004", "epoch-0003-step-00000012":
        script = trainer(tmp_path, max_epoch=3, resume=4)
        assert script.train(8).resumed_from == began
        script.train(12)


class Failing(TinyTask):
    """Its loss is NaN at one sample."""

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        return {**super().train_step(batch), "a_loss": float("nan") if 5 in batch[0] else 0.0}


def test_run_training_goes_on_by_itself(tmp_path: Path) -> None:
    lines: list[str] = []
    ending = trainer(tmp_path, Failing(), services=[Recovery()], lines=lines, resume=False).run_training()
    assert (ending.finished, ending.step, ending.rollbacks) == (True, 6, 2)
    assert len([line for line in lines if line.startswith("rollback")]) == 2
    assert all(6 not in one.batches[0].samples for one in RunJournal(tmp_path).rollbacks())  # type: ignore
    with pytest.raises(NonFiniteError):
        trainer(tmp_path / "bound", Failing(), services=[Recovery(1)]).run_training()


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("wrap", [iter, everstep.data.replay, everstep.data.prefetch, everstep.data.checked])
def test_a_failure_in_data_that_can_be_read_once_stands(tmp_path: Path, wrap: Any) -> None:
    batches = ((np.array([at, at + 1]),) for at in range(0, 8, 2))
    lines: list[str] = []
    run = trainer(
        tmp_path, Failing(), services=[Recovery()], streams={"train": wrap(batches)}, lines=lines, max_epoch=1
    )
    with pytest.raises(NonFiniteError, match="a_loss") as failed:
        run.run_training()
    reason = "step 3 is not undone: stream 'train' is an iterator, which cannot be read again; give a list"
    assert reason in failed.value.__notes__[-1]
    assert [line for line in lines if line.startswith(reason)]
    assert RunJournal(tmp_path).rollbacks() == []


def test_the_time_budget_counts_the_tries(tmp_path: Path) -> None:
    clock = ManualClock()

    class Slow(Failing):
        def train_step(self, batch: Any) -> Mapping[str, Any]:
            clock.advance(10)
            return super().train_step(batch)

    with pytest.raises(Interrupted) as left:
        trainer(
            tmp_path,
            Slow(),
            services=[Recovery()],
            clock=clock,
            max_time=65,
            streams={"train": numbers(8, 2)},
        ).run_training()  # 3 steps, rollback, 1 step from the third on, and so on
    assert left.value.code == 3 and clock() <= 80


# -------------------- trainer law1


class Crashing(TinyTask):
    """Raises at the given call; calls of the task are counted from 1."""

    def __init__(self, crash: int = 0) -> None:
        super().__init__()
        self.calls, self.crash = 0, crash

    def called(self) -> None:
        self.calls += 1
        if self.calls == self.crash:
            raise Boom

    def train_loop_begin(self) -> None:
        self.called()

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        self.called()
        return super().train_step(batch)

    def train_loop_end(self) -> Mapping[str, Any]:
        self.called()
        return {"weight": self.w[0]}

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        self.called()
        return super().eval_step(batch)


def start(run_dir: Path, every: everstep.schedule.Schedule, crash: int = 0) -> Crashing:
    task = Crashing(crash)
    services = [
        everstep.Evaluate("valid", everstep.Every(steps=3) | everstep.Every(epochs=1), validate_first=True),
        everstep.EarlyStop("valid/loss", patience=9),
        everstep.Best("valid/loss"),
        everstep.Checkpoints(every),
    ]
    trainer(run_dir, task, services=services).run_training()
    return task


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(
    "every", [everstep.Every(steps=3), everstep.Every(steps=1), everstep.Never()], ids=str
)
def test_a_run_that_crashed_anywhere_is_the_run_that_did_not(
    tmp_path: Path, every: everstep.schedule.Schedule
) -> None:
    calls = start(tmp_path / "straight", everstep.Never()).calls
    assert calls > 20
    for crash in share(range(1, calls + 1), 3):
        run_dir = tmp_path / str(crash)
        with pytest.raises(Boom):
            start(run_dir, every, crash)
        start(run_dir, every)
        assert compare_runs(tmp_path / "straight", run_dir) == [], crash


class CtrlC(TinyTask):
    """Ctrl-C comes in the given batch of the evaluations, counted from 1."""

    def __init__(self, at: int = 0) -> None:
        super().__init__()
        self.at = at
        self.evaluated: list[Any] = Notes()

    @property
    def batches(self) -> int:
        return len(self.evaluated)

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        self.evaluated.append(batch)
        if self.batches == self.at:
            os.kill(os.getpid(), signal.SIGINT)
        return super().eval_step(batch)


def evaluated_twice(run_dir: Path, at: int = 0, **arguments: Any) -> CtrlC:
    """Two evaluations at each boundary, one before the first step, and services that decide after them."""
    every = everstep.Every(steps=3) | everstep.Every(epochs=1)
    services = [
        everstep.Evaluate("valid", every, validate_first=True),
        everstep.Evaluate("test", every),
        everstep.EarlyStop("valid/loss", patience=9),
        everstep.Best("test/loss", "min"),
        everstep.Checkpoints(everstep.Every(epochs=2)),
    ]
    task = CtrlC(at)
    trainer(run_dir, task, services=services, max_epoch=2, **arguments).run_training()
    return task


@pytest.mark.campaign("long", gate="share")
def test_ctrl_c_leaves_an_evaluation_within_a_batch_and_loses_no_step(tmp_path: Path) -> None:
    batches = evaluated_twice(tmp_path / "straight").batches
    assert batches > 20
    for at in share(range(1, batches + 1), 3):
        run_dir = tmp_path / str(at)
        with pytest.raises(SystemExit) as raised:
            evaluated_twice(run_dir, at)
        assert raised.value.code == 130
        assert evaluated_twice(run_dir).batches <= batches - at + 5, "evaluations that were over ran again"
        assert compare_runs(tmp_path / "straight", run_dir) == [], at
        assert not list((run_dir / "superseded").glob("*")), "the open checkpoint is still there"


def test_a_step_is_run_again_only_where_it_is_an_epochs_last(tmp_path: Path) -> None:
    def interrupted(at: int) -> list[int]:
        tasks = [CtrlC(at), CtrlC()]
        every = everstep.Every(steps=1)
        for task in tasks:
            services = [everstep.Evaluate("test", every), everstep.Checkpoints(everstep.Never())]
            try:
                trainer(tmp_path / str(at), task, services=services, max_epoch=1).run_training()
            except SystemExit:
                assert task.batches == at, "it went on in the evaluation"
        return [len(task.seen) for task in tasks]

    assert interrupted(1) == [1, 3]  # 4 steps, 2 batches of evaluation after each
    assert interrupted(6) == [3, 1]
    assert interrupted(7) == [4, 1]  # the state of one step before was saved: see docs/design.md


def test_the_time_budget_ends_an_evaluation(tmp_path: Path) -> None:
    clock = ManualClock()

    class Slow(TinyTask):
        def eval_step(self, batch: Any) -> Mapping[str, Any]:
            clock.advance(10.0)
            self.trace.append("eval")
            return super().eval_step(batch)

    task = Slow()
    trainer(tmp_path / "straight", Slow()).run_training()
    with pytest.raises(SystemExit) as raised:
        trainer(tmp_path / "run", task, clock=clock, max_time=15.0).run_training()
    assert raised.value.code == 3 and len(task.trace) == 2 and len(task.seen) == 4
    again = Slow()
    trainer(tmp_path / "run", again, clock=clock, max_time=1000.0).run_training()
    assert len(again.seen) == 4 and len(again.trace) == 6
    assert compare_runs(tmp_path / "straight", tmp_path / "run") == []


@pytest.mark.campaign("long", gate="share")
def test_ctrl_c_in_an_evaluation_of_your_own_program(tmp_path: Path) -> None:
    def start(run_dir: Path, at: int = 0) -> CtrlC:
        task = CtrlC(at)
        door = trainer(run_dir, task, services=[everstep.Evaluate("test", everstep.Never())])
        with door.open() as loop:
            for _ in loop.iter_epochs():
                door.epoch("train", "valid")
        return task

    start(tmp_path / "straight")
    for at in share(range(2, 7), 1):
        with pytest.raises(SystemExit):
            start(tmp_path / str(at), at)
        start(tmp_path / str(at))
        assert compare_runs(tmp_path / "straight", tmp_path / str(at)) == [], at


class Averaged(everstep.torch.Task):
    """With dropout and an average of its weights; Ctrl-C comes in the given batch of the evaluations."""

    at, batches = 0, 0

    def build_model(self) -> Any:
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))

    def build_optimizer(self, model: Any) -> Any:
        return torch.optim.Adam(model.parameters())

    def forward(self, batch: Any) -> Mapping[str, Any]:
        return {"loss": torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])}

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        self.batches += 1
        if self.batches == self.at:
            os.kill(os.getpid(), signal.SIGINT)
        return super().eval_step(batch)


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("at", range(2, 9, 2))
def test_ctrl_c_in_an_evaluation_of_averaged_weights_with_a_dataloader(tmp_path: Path, at: int) -> None:
    x, y = torch.randn(10, 4, generator=torch.Generator().manual_seed(1)), torch.arange(10) % 3
    samples = torch.utils.data.TensorDataset(x, y)

    def start(name: str, at: int = 0) -> None:
        task = Averaged(ema=0.5)
        task.at = at
        streams = {
            "train": torch.utils.data.DataLoader(samples, 3, shuffle=True),
            "valid": torch.utils.data.DataLoader(samples, 5, shuffle=True),
        }
        services = [everstep.Evaluate("valid", everstep.Every(steps=3) | everstep.Every(epochs=1))]
        trainer(tmp_path / name, task, streams=streams, services=services).run_training()

    start("straight")
    with pytest.raises(SystemExit):
        start("run", at)
    start("run")
    assert compare_runs(tmp_path / "straight", tmp_path / "run") == []
