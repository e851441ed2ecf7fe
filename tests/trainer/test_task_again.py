"""A torch Task after an update that failed, or that was left out: as if nothing of it were there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_task import TinyTask, numbers
from torch.nn.functional import cross_entropy

import everstep
from everstep.proof.compare import compare_runs
from tiny_runs import Boom

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 3


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


def trainer(run_dir: Path, task: everstep.Task, epochs: int = 2, **options: Any) -> everstep.Trainer:
    streams = {"train": everstep.data.arrays(X, Y, batch_size=4)}
    options = {"services": [everstep.Checkpoints(everstep.Every(steps=3))], **options}
    return everstep.Trainer(task, streams, run_dir, max_epoch=epochs, seed=0, **options)


SETTINGS = [
    pytest.param({"accumulate": 3, "clip": everstep.torch.Clip(global_norm=1.0)}, id="window"),
    pytest.param({"autocast": torch.float16}, id="float16"),
]


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("given", SETTINGS)
def test_the_same_objects_go_on_after_an_error_as_new_ones(tmp_path: Path, given: Any) -> None:
    for name, new in (("anew", True), ("same", False)):
        door = trainer(tmp_path / name, Failing(2, Boom, **given))
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
    assert trainer(tmp_path, task, 1).run_training().step == 4 > task.made


def test_gradients_that_clipping_refuses_are_no_missing_update(tmp_path: Path) -> None:
    class Infinite(Failing):
        steps = 0

        def forward(self, batch: Any) -> dict[str, torch.Tensor]:
            self.steps += 1
            scale = torch.tensor(0.0 if self.steps > 4 else 1e38)
            return {"loss": super().forward(batch)["loss"] + scale * self.model.bias.sum()}

    task = Infinite(0, Boom, clip=everstep.torch.Clip(global_norm=1.0))
    trainer(tmp_path, task, default_services=False).run_training()
    assert task.made == 4


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
