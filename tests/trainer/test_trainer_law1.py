"""Law 1 at the third door: an error in any call of the task, at every place where it can come."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_task import TinyTask, trainer

import everstep
from everstep.proof.compare import compare_runs
from everstep.testing import ManualClock
from gate import share
from tiny_runs import Boom


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
        self.at, self.batches = at, 0

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        self.batches += 1
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
