"""Generators that a loader keeps, and what a program does with them at the head and tail of its epochs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import everstep
from everstep import Every
from everstep.proof.compare import compare_runs

X = torch.arange(12.0)
EPOCHS = 4


class Killed(Exception):
    """Stands for a kill: nothing is saved after it."""


def loader(generator: Any) -> Any:
    return DataLoader(TensorDataset(X), 4, shuffle=True, generator=generator)


class Head:
    """What a program does at the head of each epoch: gives the loader of that epoch."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)
        self.loader = loader(self.generator)

    def __call__(self, epoch: int) -> Any:
        return self.loader


class SeededAnew(Head):
    def __call__(self, epoch: int) -> Any:
        self.generator.manual_seed(100 + epoch)
        return self.loader


class SeededOnce(Head):
    def __call__(self, epoch: int) -> Any:
        if epoch == 2:
            self.generator.manual_seed(11)
        return self.loader


class LoaderAnew(Head):
    def __call__(self, epoch: int) -> Any:
        return loader(torch.Generator().manual_seed(100 + epoch))


class GeneratorShared(Head):
    """The loader is new in each epoch, and its generator goes on."""

    def __call__(self, epoch: int) -> Any:
        return loader(self.generator)


class AlwaysTheSame(Head):
    def __call__(self, epoch: int) -> Any:
        self.generator.manual_seed(5)
        return self.loader


class Noisy(torch.utils.data.Dataset[Any]):
    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return (X[index] + self.rng.random(),)


class DatasetAnew(Head):
    def __call__(self, epoch: int) -> Any:
        return DataLoader(Noisy(np.random.default_rng(epoch)), 4)


class DatasetKept(Head):
    def __init__(self) -> None:
        self.loader = DataLoader(Noisy(np.random.default_rng(3)), 4)


HEADS = [Head, SeededAnew, SeededOnce, LoaderAnew, GeneratorShared, AlwaysTheSame, DatasetAnew, DatasetKept]
BLIND = {AlwaysTheSame: range(4, 7)}
"""Kills after which a resume goes on from the end of the first pass, where it cannot be told yet that the
program sets its generator to the same seed again and again."""


def train(run: Path, head: Callable[[int], Any], stop_at: int | None, every: Any, draw: bool) -> list[float]:
    seen: list[float] = []
    services = [everstep.Checkpoints(every)]
    loop = everstep.TrainLoop(run, {"seen": seen}, max_epoch=EPOCHS, services=services, seed=1)
    with loop:
        for epoch in loop.iter_epochs():
            data = head(epoch)
            for step, (batch,) in loop.iter_steps(data):
                seen.extend(float(x) for x in batch)
                if step == stop_at:
                    raise Killed
            if draw:
                seen.append(float(torch.rand((), generator=data.generator)))
    return seen


@pytest.mark.parametrize(
    ("every", "draw"), [(Every(epochs=1), False), (Every(steps=1), True)], ids=["epochs", "steps, tail draws"]
)
@pytest.mark.parametrize("make", HEADS, ids=lambda head: head.__name__)
def test_a_head_may_set_the_generators_of_its_loader(
    tmp_path: Path, make: Callable[[], Any], every: Any, draw: bool
) -> None:
    straight = train(tmp_path / "straight", make(), None, every, draw)
    for stop_at in (4, 6, 7, 10):
        run = tmp_path / f"{stop_at}"
        with pytest.raises(Killed):
            train(run, make(), stop_at, every, draw)
        resumed = train(run, make(), None, every, draw)
        if stop_at in BLIND.get(make, ()):
            continue
        assert resumed == straight, stop_at
        assert compare_runs(tmp_path / "straight", run) == [], stop_at


def test_a_head_that_draws_from_the_generator_of_its_loader_is_told(tmp_path: Path) -> None:
    lines: list[str] = []
    generator = torch.Generator().manual_seed(7)
    data = loader(generator)

    def run(state: dict[str, Any], name: str) -> int:
        lines.clear()
        console = everstep.Console(sink=lines.append)
        with everstep.TrainLoop(tmp_path / name, state, max_epoch=3, services=[console]) as loop:
            for _ in loop.iter_epochs():
                torch.rand((), generator=generator)
                for _ in loop.iter_steps(data):
                    pass
        return sum("draw from its generator" in line for line in lines)

    assert run({}, "a") == 1
    assert run({"generator": generator}, "b") == 0
