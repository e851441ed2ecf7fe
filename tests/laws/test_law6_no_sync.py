"""Law 6: a step on which nothing is due waits for no device.

On a GPU torch itself judges (bench/cuda_sync.py).  Here it is a framework of this test's own, whose
numbers lie on a "device": it writes down when somebody waits for them.  (That no update of a torch Task
waits, trainer/test_torch_task.py asks of a device that has no values.)
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep import Every, backends
from everstep.backends.numpy import NumpyBackend
from everstep.record import RunJournal
from everstep.services import Throughput
from everstep.testing import ManualClock
from tiny_runs import rows, supervised


class Far:
    """A number on the device."""

    def __init__(self, number: float) -> None:
        self.number = number


class FarBackend(NumpyBackend):
    name = "far"
    array_types = (Far,)

    def __init__(self) -> None:
        self.now, self.waits = 0, []
        self.clock, self.queued = ManualClock(), 0.0

    def random_state(self) -> Any:
        return None

    def set_random_state(self, state: Any) -> None: ...

    def entry(self, value: Any) -> None:
        return None

    def scalar(self, value: Far) -> Far:
        return Far(value.number)

    def read_scalars(self, values: Any) -> list[float]:
        self.waits.append(self.now)
        return [float(value.number) for value in values]

    def synchronize(self) -> None:
        self.waits.append(self.now)
        self.clock.advance(self.queued)
        self.queued = 0.0


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> FarBackend:
    backend = FarBackend()
    monkeypatch.setitem(sys.modules, "far", ModuleType("far"))
    monkeypatch.setitem(backends._HOMES, "far", "far")
    monkeypatch.setitem(backends._loaded, "far", backend)
    monkeypatch.setattr(backends, "_by_type", {})
    return backend


def services(judged: Every | None = None) -> list[everstep.Service]:
    early = everstep.EarlyStop("valid_loss", patience=3, every=judged)
    guards = [everstep.services.NaNGuard(), everstep.services.StopAfter(seconds=1e6)]
    seen = [everstep.services.Console(sink=lambda line: None), Throughput(every=Every(steps=100))]
    saves = everstep.Checkpoints(Every(steps=100))
    return [saves, everstep.Best("valid_loss", every=judged), early, *guards, *seen]


def test_train_loop(tmp_path: Path, far: FarBackend) -> None:
    state, options = {"w": np.zeros(2)}, {"services": services(), "clock": ManualClock()}
    with everstep.TrainLoop(tmp_path, state, max_epoch=2, **options) as loop:
        for epoch in loop.iter_epochs():
            for step, _ in loop.iter_steps(range(150)):
                far.now = step
                loop.collect_metrics(loss=Far(1.0 / step), grad=Far(float(step)))
            far.now = 1000 * epoch
            loop.collect_metrics(valid_loss=Far(1.0 / epoch))
            loop.print_logs()
    require_few(far, due={1, 100, 149, 150, 151, 200, 299, 300})


def require_few(far: FarBackend, due: set[int]) -> None:
    """Waits at steps on which something was due, and where a commit was announced, whenever it was done."""
    waited = set(far.waits) & set(range(1, 301))
    commits = 5
    assert len(waited - due) <= commits, waited
    assert len(far.waits) <= 4 * len(due), far.waits


def test_supervisor(tmp_path: Path, far: FarBackend) -> None:
    def step(sv: everstep.Supervisor) -> dict[str, Far]:
        far.now = sv.step + 1
        return {"loss": Far(2.0)}

    options = {"max_step": 300, "services": services(Every(steps=100)), "clock": ManualClock()}
    supervised(everstep.Supervisor(tmp_path, {"w": np.zeros(2)}, **options), step)
    require_few(far, due={1, 100, 200, 299, 300})


def test_a_speed_is_that_of_what_the_device_has_done(tmp_path: Path, far: FarBackend) -> None:
    services = [Throughput(3, every=Every(steps=4)), everstep.services.Console(sink=lambda line: None)]
    with everstep.TrainLoop(tmp_path / "run", services=services, max_epoch=1, clock=far.clock) as loop:
        for _ in loop.iter_epochs():
            for _step, _ in loop.iter_steps(range(8)):
                far.queued += 2.0
    found = RunJournal(tmp_path / "run").rows()
    speeds = {(row.name, row.step): row.value for row in found if "per_second" in row.name}
    assert speeds == {(f"{what}_per_second", step): value
                      for what, value in (("samples", 1.5), ("steps", 0.5)) for step in (4, 8)}  # fmt: skip


def test_trainer(tmp_path: Path, far: FarBackend) -> None:
    """With accumulation, clipping, an average and a schedule: how often is read is the services' affair."""
    few = trained(tmp_path / "few", far, 50)
    require_few(far, due={1, 50, 99, 100, 101, 150, 199, 200})
    far.waits.clear()
    assert trained(tmp_path / "many", far, 1) == few
    assert {*range(1, 201)} <= {*far.waits}


class Reading(everstep.torch.Task):
    """With a number of the device."""

    scheduler_interval = "update"
    far: FarBackend

    def build_model(self) -> Any:
        return torch.nn.Linear(3, 1)

    def build_optimizer(self, model: Any) -> Any:
        return torch.optim.AdamW(model.parameters())

    def build_scheduler(self, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 10)

    def forward(self, batch: Any) -> Mapping[str, Any]:
        self.far.now += 1
        loss = self.model(batch).square().mean()
        return {"loss": loss, "far": Far(loss.item())}


def trained(run_dir: Path, far: FarBackend, every: int) -> list[tuple[Any, ...]]:
    """200 steps, looked at every so many; returns the rows."""
    services = [
        everstep.services.LogVariables(["far"], every=Every(steps=every)),
        everstep.services.NaNGuard(metrics=["far", "loss"]),
        everstep.services.Console(sink=lambda line: None),
    ]  # fmt: skip
    task = Reading(accumulate=3, clip=everstep.torch.Clip(global_norm=1.0), ema=0.9)
    task.far, far.now = far, 0
    options: Any = {"services": services, "seed": 3, "max_epoch": 2, "clock": ManualClock()}
    everstep.Trainer(task, {"train": torch.ones(100, 2, 3).unbind()}, run_dir, **options).run_training()
    return rows(run_dir)
