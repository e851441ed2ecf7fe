"""Generators that a loader keeps, and what a program does with them at the head and tail of its epochs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import everstep
from everstep import Every
from everstep.errors import Interrupted
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


class SameSeedInNew(Head):
    """As the one above, but nothing lives on that a resume could find: blind after the first pass."""

    def __call__(self, epoch: int) -> Any:
        return loader(torch.Generator().manual_seed(5))


class Draws(Head):
    def __call__(self, epoch: int) -> Any:
        torch.rand(3, generator=self.generator)
        return self.loader


class SeedsAndDraws(Head):
    def __call__(self, epoch: int) -> Any:
        self.generator.manual_seed(epoch % 2)
        torch.rand(3, generator=self.generator)
        return self.loader


class OddEpochs(Head):
    def __call__(self, epoch: int) -> Any:
        if epoch % 2:
            self.generator.manual_seed(epoch)
        return self.loader


HEADS += [Draws, SeedsAndDraws, OddEpochs]


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
    ("every", "draw"),
    [
        pytest.param(Every(epochs=1), False, id="epochs"),
        pytest.param(Every(steps=1), True, id="steps, tail draws"),
    ],
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
        assert resumed == straight, stop_at
        assert compare_runs(tmp_path / "straight", run) == [], stop_at


@pytest.mark.parametrize("make", [AlwaysTheSame, SeededAnew, Draws, Head])
def test_in_the_middle_of_a_pass_that_goes_on_over_epochs(tmp_path: Path, make: Callable[[], Any]) -> None:
    def run(name: str, stop_at: int | None) -> list[float]:
        head, seen = make(), []
        saves = everstep.Checkpoints(Every(epochs=1))
        loop = everstep.TrainLoop(
            tmp_path / name, {"seen": seen}, max_epoch=6, steps_per_epoch=2, services=[saves], seed=1
        )
        with loop:
            for epoch in loop.iter_epochs():
                for step, (batch,) in loop.iter_steps(head(epoch)):
                    seen.extend(float(x) for x in batch)
                    if step == stop_at:
                        raise Killed
        return seen

    straight = run("straight", None)
    for stop_at in range(1, 13):
        with pytest.raises(Killed):
            run(f"{stop_at}", stop_at)
        assert run(f"{stop_at}", None) == straight, stop_at


def test_another_loader_that_looks_the_same_is_not_taken_for_it(tmp_path: Path) -> None:
    """It lives in this process; the one that is read is made at the head of each epoch."""

    def run(name: str, stop_at: int | None) -> list[float]:
        look_alike = loader(torch.Generator().manual_seed(3))
        before = look_alike.generator.get_state()
        seen = train(tmp_path / name, LoaderAnew(), stop_at, Every(epochs=1), False)
        assert torch.equal(look_alike.generator.get_state(), before)
        return seen

    straight = run("straight", None)
    for stop_at in (4, 7):
        with pytest.raises(Killed):
            run(f"{stop_at}", stop_at)
        assert run(f"{stop_at}", None) == straight


def test_a_head_that_draws_from_the_generator_of_a_loader_that_cannot_be_found_again_is_told(
    tmp_path: Path,
) -> None:
    lines: list[str] = []
    generator = torch.Generator().manual_seed(7)
    data, look_alike = loader(generator), loader(torch.Generator())

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
    del look_alike
    assert run({}, "c") == 0


@pytest.mark.parametrize("every", [Every(epochs=1), Every(steps=1)], ids=["epochs", "steps"])
def test_two_loaders_that_are_seeded_at_the_head(tmp_path: Path, every: Any) -> None:
    def run(name: str, stop_at: tuple[str, int] | None) -> list[float]:
        first, second = torch.Generator(), torch.Generator()
        seen: list[float] = []
        data = {"train": loader(first), "other": DataLoader(TensorDataset(X), 6, True, generator=second)}
        saves = everstep.Checkpoints(every)
        with everstep.TrainLoop(
            tmp_path / name, {"seen": seen}, max_epoch=3, services=[saves], seed=1
        ) as loop:
            for epoch in loop.iter_epochs():
                first.manual_seed(100 + epoch)
                second.manual_seed(50 + epoch)
                for stream, batches in data.items():
                    for step, (batch,) in loop.iter_steps(batches, stream):
                        seen.extend(float(x) for x in batch)
                        if stop_at == ("step", step):
                            raise Killed
                if stop_at == ("tail", epoch):
                    os.kill(os.getpid(), signal.SIGTERM)
                loop.collect_metrics(sum=sum(seen))
        return seen

    straight = run("straight", None)
    for stop_at in [("step", 2), ("step", 4), ("step", 6), ("step", 10), ("tail", 1), ("tail", 3)]:
        name = "-".join(map(str, stop_at))
        with pytest.raises((Killed, Interrupted)):
            run(name, stop_at)
        assert run(name, None) == straight, stop_at
        assert compare_runs(tmp_path / "straight", tmp_path / name) == [], stop_at
