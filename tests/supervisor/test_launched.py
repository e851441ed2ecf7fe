"""What a launcher says is believed before anything is opened; a group of one is fine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import everstep
from everstep.errors import ConfigError, StateError
from tiny_runs import Tiny, quiet


class Nothing(everstep.Task):
    def train_step(self, batch: Any) -> dict[str, float]:
        return {}


def a_loop(run_dir: Path) -> object:
    return Tiny(run_dir, max_epoch=1).train()


def a_supervisor(run_dir: Path) -> object:
    with quiet(run_dir, max_step=1) as sv:
        while not sv.should_stop():
            sv.advance()
    return sv


def a_trainer(run_dir: Path) -> object:
    return everstep.Trainer(Nothing(), {"train": [1]}, run_dir, max_epoch=1).run_training()


def an_experiment(run_dir: Path) -> object:
    made = everstep.Experiment(Nothing, lambda: [1], run_dir=run_dir, max_epoch=1, skip_check=True)
    return made.run("train")


@pytest.mark.parametrize("door", [a_loop, a_supervisor, a_trainer, an_experiment])
def test_what_a_launcher_says_is_believed_behind_each_door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: Any
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"RANK"):
        door(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    door(tmp_path / "run")


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_one_trains(tmp_path: Path) -> None:
    assert Tiny(tmp_path / "run", max_epoch=1).train().loop.ending.finished


@pytest.mark.usefixtures("group_of_one")
def test_a_model_that_is_sharded_after_the_loop_was_made_is_refused_by_name(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(2, 2)
    loop = quiet(tmp_path / "late", {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)})
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(StateError, match=r"'bias' was sharded after the loop was made .*: shard the"), loop:
        pass


@pytest.mark.campaign("long")
@pytest.mark.usefixtures("group_of_one")
def test_a_sharded_model_on_one_process_is_that_of_any_other(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def train(run: str, wrap: Callable[[torch.nn.Module], Any], steps: int) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        wrap(model)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        with quiet(tmp_path / run, {"model": model, "optimizer": optimizer}, max_step=steps) as sv:
            while not sv.should_stop():
                model(torch.full((3, 2), float(sv.step))).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                sv.advance()
        weight: Any = model.weight.detach()
        return getattr(weight, "_local_tensor", weight).clone()

    def shard(model: torch.nn.Module) -> Any:
        return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))

    straight = train("plain", lambda model: None, 2)
    assert torch.equal(train("sharded", shard, 1), train("turn", lambda model: None, 1))
    assert torch.equal(train("sharded", shard, 2), straight)
    assert torch.equal(train("turn", shard, 2), straight)
    assert torch.equal(train("turn", lambda model: None, 3), train("sharded", shard, 3))
