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
from everstep.errors import Interrupted, NotResumableError
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


HEADS = [Head, SeededAnew, SeededOnce, LoaderAnew, GeneratorShared, DatasetAnew, DatasetKept]
"""What each does to the generators can be told from their states, and from the record."""
BLIND = [AlwaysTheSame, Draws, SeedsAndDraws, OddEpochs]
"""What these do cannot be told where the data is not known before."""
KEPT = [Head, SeededAnew, SeededOnce, DatasetKept, *BLIND]
"""Those of one loader, which can be declared."""
SAVES = [
    pytest.param(Every(epochs=1), False, id="epochs"),
    pytest.param(Every(steps=1), True, id="steps, tail draws"),
]


def train(
    run: Path,
    head: Callable[[int], Any],
    stop_at: int | None,
    every: Any,
    draw: bool,
    *,
    declared: bool = False,
) -> list[float]:
    seen: list[float] = []
    services = [everstep.Checkpoints(every)]
    streams = {"train": head.loader} if declared else None  # type: ignore[attr-defined]
    loop = everstep.TrainLoop(
        run, {"seen": seen}, max_epoch=EPOCHS, services=services, seed=1, streams=streams
    )
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


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(("every", "draw"), SAVES)
@pytest.mark.parametrize("make", KEPT, ids=lambda head: head.__name__)
def test_a_head_may_do_anything_to_the_generators_of_declared_data(
    tmp_path: Path, make: Callable[[], Any], every: Any, draw: bool
) -> None:
    straight = train(tmp_path / "straight", make(), None, every, draw, declared=True)
    for stop_at in (4, 6, 7, 10):
        run = tmp_path / f"{stop_at}"
        with pytest.raises(Killed):
            train(run, make(), stop_at, every, draw, declared=True)
        assert train(run, make(), None, every, draw, declared=True) == straight, stop_at
        assert compare_runs(tmp_path / "straight", run) == [], stop_at


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(("every", "draw"), SAVES)
@pytest.mark.parametrize("make", BLIND, ids=lambda head: head.__name__)
def test_what_a_resume_cannot_tell_of_data_that_is_not_declared_is_refused(
    tmp_path: Path, make: Callable[[], Any], every: Any, draw: bool
) -> None:
    straight = train(tmp_path / "straight", make(), None, every, draw)
    refused = []
    for stop_at in (4, 6, 7, 10):
        run = tmp_path / f"{stop_at}"
        with pytest.raises(Killed):
            train(run, make(), stop_at, every, draw)
        try:
            resumed = train(run, make(), None, every, draw)
        except NotResumableError as error:
            refused.append(str(error))
            resumed = train(run, make(), None, every, draw, declared=True)
        assert resumed == straight, stop_at
        assert compare_runs(tmp_path / "straight", run) == [], stop_at
    assert refused
    assert all("declare the data where the loop is made, streams={'train': data}" in each for each in refused)


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(("every", "draw"), SAVES)
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


@pytest.mark.campaign("long")
@pytest.mark.parametrize("make", [AlwaysTheSame, SeededAnew, Draws, Head])
def test_in_the_middle_of_a_pass_that_goes_on_over_epochs(tmp_path: Path, make: Callable[[], Any]) -> None:
    def run(name: str, stop_at: int | None, *, declared: bool = True) -> list[float]:
        head, seen = make(), []
        loop = everstep.TrainLoop(
            tmp_path / name,
            {"seen": seen},
            max_epoch=6,
            steps_per_epoch=2,
            services=[everstep.Checkpoints(Every(epochs=1))],
            seed=1,
            streams={"train": head.loader} if declared else None,
        )
        with loop:
            for epoch in loop.iter_epochs():
                for step, (batch,) in loop.iter_steps(head(epoch)):
                    seen.extend(float(x) for x in batch)
                    if step == stop_at:
                        raise Killed
        return seen

    straight, refused = run("straight", None), list[str]()
    for stop_at in range(1, 13):
        name = f"{stop_at}"
        with pytest.raises(Killed):
            run(name, stop_at, declared=False)
        try:
            resumed = run(name, None, declared=False)
        except NotResumableError as error:
            refused.append(str(error))
            resumed = run(name, None)
        assert resumed == straight, stop_at
        assert compare_runs(tmp_path / "straight", tmp_path / name) == [], stop_at
    assert bool(refused) == (make is not Head)


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


def test_a_head_that_draws_from_the_generator_of_a_loader_that_is_not_declared_is_told(
    tmp_path: Path,
) -> None:
    lines: list[str] = []
    generator = torch.Generator().manual_seed(7)
    data = loader(generator)

    def run(state: dict[str, Any], name: str, **options: Any) -> int:
        lines.clear()
        console = everstep.Console(sink=lines.append)
        with everstep.TrainLoop(tmp_path / name, state, max_epoch=3, services=[console], **options) as loop:
            for _ in loop.iter_epochs():
                torch.rand((), generator=generator)
                for _ in loop.iter_steps(data):
                    pass
        return sum("draw from its generator, so a resume" in line for line in lines)

    assert run({}, "a") == 1
    assert run({"generator": generator}, "b") == 0
    assert run({}, "c", streams={"train": data}) == 0


def test_a_start_that_took_a_head_for_harmless_says_so_when_it_learns_better(tmp_path: Path) -> None:
    """Killed between the end of the first epoch and its head, the record knows nothing of heads yet."""

    def run(*, killed: bool = False) -> str:
        head, lines = Draws(), list[str]()
        services = [everstep.Console(sink=lines.append), everstep.Checkpoints(Every(epochs=1))]
        with everstep.TrainLoop(tmp_path / "run", {}, max_epoch=3, services=services, seed=1) as loop:
            for epoch in loop.iter_epochs():
                if killed and epoch == 2:
                    raise Killed
                for _ in loop.iter_steps(head(epoch)):
                    pass
        return "\n".join(lines)

    with pytest.raises(Killed):
        run(killed=True)
    assert "not yet recorded that lines at the head of an epoch" in run()


@pytest.mark.campaign("long")
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
