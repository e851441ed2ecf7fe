"""Several Trainers on one pass over the data: each is the run that it would be alone."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_task import TinyTask, trainer

import everstep
from counting import Counted
from everstep.errors import ConfigError, Interrupted
from everstep.proof.compare import compare_runs
from everstep.trainer.multi_run import copied
from tiny_runs import Boom

READS: list[int] = []


def counted(**arguments: Any) -> Counted:
    """A stream that tells which batches were read."""
    stream = everstep.data.arrays(np.arange(8.0), batch_size=2, shuffle=True, **arguments)
    return Counted(stream, lambda batch: READS.append(int(batch[0][0])))


class Scaled(TinyTask):
    """Changes its batch in place; may act at a step of its own."""

    def __init__(self, scale: float = 1.0, act_at: int = 0, act: Callable[[], object] = Boom) -> None:
        super().__init__()
        self.scale, self.act_at, self.act = scale, act_at, act
        self.count = np.zeros(1)

    def state(self) -> Mapping[str, Any]:
        return {**super().state(), "count": self.count}

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        (ids,) = batch
        ids *= self.scale
        found = super().train_step(batch)
        self.count += 1
        if int(self.count[0]) == self.act_at and isinstance(happens := self.act(), BaseException):
            raise happens
        return found


SCALES = (1.0, 2.0, 0.5)
NAMES = ("a", "b", "c")


def runs(folder: Path, tasks: Mapping[str, everstep.Task], **arguments: Any) -> list[everstep.Trainer]:
    """A Trainer for each task, by the name of its run; their data is one object."""
    data = arguments.pop("data", None) or counted()
    every = everstep.Checkpoints(everstep.Every(steps=3), keep_last=None)
    return [
        trainer(folder / name, task, streams={"train": data}, services=[every], max_epoch=3, **arguments)
        for name, task in tasks.items()
    ]


def scaled(**acts: tuple[int, Callable[[], object]]) -> dict[str, everstep.Task]:
    return {
        name: Scaled(scale, *acts.get(name, (0, Boom))) for name, scale in zip(NAMES, SCALES, strict=True)
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each run for itself."""
    folder = tmp_path_factory.mktemp("alone")
    for each in runs(folder, scaled()):
        each.run_training()
    return folder


def assert_same(folder: Path, alone: Path) -> None:
    for name in NAMES:
        assert compare_runs(folder / name, alone / name) == []


def assert_as_alone(
    folder: Path, together: Callable[[Path], list[everstep.Trainer]]
) -> list[everstep.supervisor.Ending]:
    for each in together(folder / "alone"):
        each.run_training()
    endings = everstep.trainer.MultiRun(together(folder / "together")).run_training()
    assert_same(folder / "together", folder / "alone")
    return endings


def test_each_is_the_run_that_it_would_be_alone_and_a_batch_is_read_once(tmp_path: Path, alone: Path) -> None:
    READS.clear()
    before = np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    endings = everstep.trainer.MultiRun(runs(tmp_path, scaled())).run_training()
    assert [ending.step for ending in endings] == [12, 12, 12]
    assert len(READS) == 12
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index, union-attr]
    assert_same(tmp_path, alone)


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("at", [1, 3, 4, 6, 12])
def test_one_that_fails_leaves_the_others_alone_and_goes_on_behind_them(
    tmp_path: Path, alone: Path, at: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Boom) as raised:
        everstep.trainer.MultiRun(runs(tmp_path, scaled(b=(at, Boom)))).run_training()
    assert any(str(tmp_path / "b") in note for note in raised.value.__notes__)
    assert "b failed: Boom" in capsys.readouterr().out
    for name in ("a", "c"):
        assert compare_runs(tmp_path / name, alone / name) == []
    everstep.trainer.MultiRun(runs(tmp_path, scaled())).run_training()
    assert_same(tmp_path, alone)


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("at", [1, 7, 12])
def test_a_signal_saves_all_and_all_go_on(tmp_path: Path, alone: Path, at: int) -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as raised:
        everstep.trainer.MultiRun(runs(tmp_path, scaled(b=(at, interrupt)))).run_training()
    assert raised.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    READS.clear()
    endings = everstep.trainer.MultiRun(runs(tmp_path, scaled())).run_training()
    assert all(ending.step == 12 for ending in endings)
    assert len(READS) <= 12 - at + 2
    assert_same(tmp_path, alone)


@pytest.mark.campaign("long")
def test_runs_that_stand_apart_come_together(tmp_path: Path, alone: Path) -> None:
    tasks = scaled()
    for steps, each in zip((3, 7), runs(tmp_path, {name: tasks[name] for name in "ab"}), strict=True):
        each.train(steps)
    READS.clear()
    everstep.trainer.MultiRun(runs(tmp_path, scaled())).run_training()
    assert len(READS) <= 12 + 4  # not 12 + 9 + 5: where they met, a batch was read twice
    assert_same(tmp_path, alone)


@pytest.mark.campaign("long")
def test_limits_evaluations_and_stops_are_each_ones_own(tmp_path: Path) -> None:
    def together(folder: Path) -> list[everstep.Trainer]:
        data = counted()
        stop = everstep.EarlyStop("valid/loss", patience=1)
        return [
            trainer(folder / "a", Scaled(), streams={"train": data}, max_epoch=2),
            trainer(folder / "b", Scaled(3.0), streams={"train": data}, max_epoch=6, services=[stop]),
            trainer(folder / "c", Scaled(0.1), streams={"train": data}, max_epoch=6, max_step=9),
        ]

    endings = assert_as_alone(tmp_path, together)
    assert endings[0].step == 8 and endings[2].step == 9


@pytest.mark.campaign("long")
def test_one_that_goes_back_comes_to_the_others_again(tmp_path: Path) -> None:
    class Spoilt(Scaled):
        def train_step(self, batch: Any) -> Mapping[str, Any]:
            spoilt = 3 in batch[0]
            found = super().train_step(batch)
            return {"loss": math.nan} if spoilt else found

    def together(folder: Path) -> list[everstep.Trainer]:
        data, saves = counted(), everstep.Checkpoints(everstep.Every(steps=3))
        services = {"a": [saves], "b": [saves, everstep.services.Recovery(9)], "c": [saves]}
        tasks = {"a": Scaled(), "b": Spoilt(), "c": Scaled(3.0)}
        return [
            trainer(folder / name, task, streams={"train": data}, max_epoch=3, services=services[name])
            for name, task in tasks.items()
        ]

    endings = assert_as_alone(tmp_path, together)
    assert [ending.step for ending in endings] == [12, 9, 12]


@pytest.mark.campaign("long")
def test_torch_models_with_dropout_and_a_loader_of_augmented_samples(tmp_path: Path) -> None:
    class Noisy(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            return torch.randn(4) + index, index % 3

    class Net(everstep.torch.Task):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.width = width

        def build_model(self) -> Any:
            layers = torch.nn.Linear(4, self.width), torch.nn.Dropout(0.5), torch.nn.Linear(self.width, 3)
            return torch.nn.Sequential(*layers)

        def build_optimizer(self, model: Any) -> Any:
            return torch.optim.Adam(model.parameters())

        def forward(self, batch: Any) -> Mapping[str, Any]:
            return {"loss": torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])}

    def together(folder: Path) -> list[everstep.Trainer]:
        data = everstep.data.loader(Noisy(), batch_size=4, shuffle=True, num_workers=0)
        return [
            everstep.Trainer(Net(width), {"train": data}, folder / name, seed=5, max_epoch=2)
            for name, width in (("a", 4), ("b", 6), ("c", 4))
        ]

    assert_as_alone(tmp_path, together)


def numbers(**arguments: Any) -> Any:
    return everstep.data.arrays(np.arange(8.0), batch_size=2, shuffle=True, **arguments)


def test_what_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    def several(data: Any, *seeds: int | None) -> list[everstep.Trainer]:
        return [
            everstep.Trainer(TinyTask(), {"train": data()}, tmp_path / str(number), seed=seed, max_step=3)
            for number, seed in enumerate(seeds)
        ]

    shared, own = numbers(), numbers(seed=0)
    loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=2, shuffle=True)
    wrapped, ready = everstep.data.as_stream(loader), everstep.data.as_stream([np.arange(4.0)] * 3)
    everstep.trainer.MultiRun(several(lambda: own, 1, 2, None))
    everstep.trainer.MultiRun(several(lambda: ready, 1, 1))
    wrong: list[tuple[list[Any], str]] = [
        (several(lambda: shared, 1, 2), r"runs have the seeds \[1, 2\]; give all Trainers one seed"),
        (several(lambda: shared, None, None), "give all Trainers one seed"),
        (several(numbers, 1, 1), 'give each of them the same object as "train"'),
        (several(lambda: loader, 1, 1), "give each of them the same object"),  # a stream for each run
        (several(lambda: wrapped, 1, 1), "several runs cannot share"),
        ([], "give Trainers"),
        ([TinyTask()], "give Trainers"),
    ]
    for trainers, said in wrong:
        with pytest.raises(ConfigError, match=said):
            everstep.trainer.MultiRun(trainers)


def test_a_copy_has_its_own_memory_and_the_strides() -> None:
    array = np.arange(24.0).reshape(2, 3, 4)
    for each in (array, array[:, ::-1], array.T, array[:, :1].transpose(1, 2, 0)):
        made = copied({"x": (each, [each])})["x"][0]
        assert made.strides == each.strides and np.array_equal(made, each)
        assert not np.shares_memory(made, each)
    tensor = torch.arange(6.0).reshape(2, 3).T
    assert copied(tensor).stride() == tensor.stride()
