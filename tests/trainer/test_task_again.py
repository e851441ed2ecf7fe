"""A torch Task after an update that failed, or that was left out: as if nothing of it were there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_task import TinyTask, numbers
from torch.nn.functional import cross_entropy

import everstep
from everstep.errors import NonFiniteError
from everstep.proof.compare import compare_runs
from tiny_runs import Boom

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 3


class Failing(everstep.torch.Task):
    """The update of number `fails` raises, once, after the gradients were unscaled and clipped."""

    def __init__(self, fails: int, error: type[Exception], **given: Any) -> None:
        super().__init__(**given)
        self.fails, self.error, self.made = fails, error, 0

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Linear(6, 3)

    def build_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer.register_step_pre_hook(self.count)
        return optimizer

    def count(self, *_: Any) -> None:
        self.made += 1
        if self.made == self.fails:
            self.fails = 0
            raise self.error("a bad update")

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": cross_entropy(self.model(batch[0]).float(), batch[1])}


def trainer(run_dir: Path, task: everstep.Task) -> everstep.Trainer:
    return everstep.Trainer(
        task,
        {"train": everstep.data.arrays(X, Y, batch_size=4)},
        run_dir,
        max_epoch=2,
        seed=0,
        services=[everstep.Recovery(5), everstep.Checkpoints(everstep.Every(steps=7))],
    )


SETTINGS = [
    pytest.param({"autocast": torch.float16}, id="float16"),
    pytest.param({"accumulate": 3, "clip": everstep.torch.Clip(global_norm=1.0)}, id="window"),
]


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("given", SETTINGS)
def test_the_same_objects_go_on_after_a_rollback_as_new_ones(tmp_path: Path, given: Any) -> None:
    def anew() -> None:
        door = trainer(tmp_path / "anew", Failing(fails, NonFiniteError, **given))
        with door.open() as loop:
            for _ in loop.iter_epochs():
                door.epoch()

    fails = 4
    task = Failing(fails, NonFiniteError, **given)
    trainer(tmp_path / "same", task).run_training()
    assert task.fails == 0

    def once() -> None:
        nonlocal fails
        try:
            anew()
        finally:
            fails = 0

    everstep.recovering(once)
    assert compare_runs(tmp_path / "anew", tmp_path / "same") == []


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("given", SETTINGS)
def test_and_after_an_error(tmp_path: Path, given: Any) -> None:
    for name, new in (("anew", True), ("same", False)):
        door = trainer(tmp_path / name, Failing(4, Boom, **given))
        with pytest.raises(Boom):
            door.run_training()
        if new:
            door = trainer(tmp_path / name, Failing(0, Boom, **given))
        door.run_training()
    assert compare_runs(tmp_path / "anew", tmp_path / "same") == []


def test_an_epoch_whose_updates_all_overflow_is_no_error(tmp_path: Path) -> None:
    """The scale begins high: float16 leaves out the first updates."""

    class Loud(Failing):
        def forward(self, batch: Any) -> dict[str, torch.Tensor]:
            return {"loss": 1e3 * super().forward(batch)["loss"]}

    task = Loud(0, Boom, autocast=torch.float16)
    data = everstep.data.arrays(X[:8], Y[:8], batch_size=4)
    ending = everstep.Trainer(task, {"train": data}, tmp_path, max_epoch=12, seed=0).run_training()
    assert ending.step == 24 > task.made > 0


def test_gradients_that_clipping_refuses_are_no_missing_update(tmp_path: Path) -> None:
    class Infinite(Failing):
        def forward(self, batch: Any) -> dict[str, torch.Tensor]:
            loss = super().forward(batch)["loss"]
            return {"loss": loss + torch.where(torch.tensor(self.seen()), 0.0, 1e38) * self.model.bias.sum()}

        def seen(self) -> bool:
            self.steps = getattr(self, "steps", 0) + 1
            return self.steps > 10

    task = Infinite(0, Boom, clip=everstep.torch.Clip(global_norm=1.0))
    everstep.Trainer(
        task,
        {"train": everstep.data.arrays(X, Y, batch_size=4)},
        tmp_path,
        max_epoch=2,
        default_services=False,
        services=[everstep.Checkpoints(everstep.Never())],
    ).run_training()
    assert task.made == 10


def test_a_smoke_test_does_not_build_again(tmp_path: Path) -> None:
    class Builds(TinyTask):
        built = 0

        def build(self) -> None:
            self.built += 1
            super().build()

    task = Builds()
    door = everstep.Trainer(task, {"train": numbers(8, 4)}, tmp_path / "run", seed=1)
    door.smoke_test()
    everstep.Trainer(task, {"train": numbers(8, 4)}, tmp_path / "other", seed=1)
    assert task.built == 1
