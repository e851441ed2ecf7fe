"""Programs that once came back otherwise than they would have gone on: each is killed at every step."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import everstep
from everstep.backends import get
from everstep.errors import UsageError
from everstep.proof.compare import compare_runs
from gate import share

SAMPLES = torch.arange(12.0).reshape(12, 1)


class Killed(BaseException):
    """Stands for SIGKILL: after an exception nothing more is saved."""


def seed_all() -> None:
    random.seed(1), np.random.seed(2), torch.manual_seed(3)


def require_exact(tmp_path: Path, program: Callable[[Path, Callable[[], None]], None], ticks: int) -> None:
    """The run that was killed at each of some places, each time from the start, is the undisturbed one.

    A share of the places is two of them.
    """

    def start(run: Path, kill_at: int) -> bool:
        seed_all()
        count = 0

        def tick() -> None:
            nonlocal count
            count += 1
            if count == kill_at:
                raise Killed

        try:
            program(run, tick)
        except Killed:
            return False
        return run.name != "whole" or count == ticks

    assert start(tmp_path / "whole", 0)
    for kill_at in share(range(1, ticks + 1), 2):
        run = tmp_path / f"killed at {kill_at}"
        assert not start(run, kill_at)
        start(run, 2)  # a second time, at once
        assert start(run, 0)
        assert compare_runs(tmp_path / "whole", run) == [], kill_at


def loop(run: Path, **state: Any) -> everstep.TrainLoop:
    often = everstep.Checkpoints(everstep.Every(steps=2) | everstep.Every(epochs=1))
    return everstep.TrainLoop(
        run, state, max_epoch=3, seed=1, services=[often], default_services=False, show_eta=False
    )


# ----------------------------------------------------------------------- generators that data keeps


def loader(generator: torch.Generator) -> DataLoader[Any]:
    return DataLoader(TensorDataset(SAMPLES), 4, shuffle=True, generator=generator)


@pytest.mark.campaign("long")
def test_two_loaders_share_a_generator(tmp_path: Path) -> None:
    def program(run: Path, tick: Callable[[], None]) -> None:
        generator, seen = torch.Generator().manual_seed(1), []
        data = {"a": loader(generator), "b": loader(generator)}
        with loop(run, seen=seen) as train:
            for _ in train.iter_epochs():
                for name, batches in data.items():
                    for _, [x] in train.iter_steps(batches, name):
                        seen.append(x.sum().item())
                        tick()

    require_exact(tmp_path, program, 18)


@pytest.mark.campaign("long", gate="share")
def test_an_evaluation_over_the_training_loader_moves_its_generator(tmp_path: Path) -> None:
    def program(run: Path, tick: Callable[[], None]) -> None:
        batches, seen = loader(torch.Generator().manual_seed(1)), []
        with loop(run, seen=seen) as train:
            for _ in train.iter_epochs():
                for _, [x] in train.iter_steps(batches):
                    seen.append(x.sum().item())
                    tick()
                with train.evaluation():
                    train.collect_metrics(first=next(iter(batches))[0][0])
                tick()

    require_exact(tmp_path, program, 12)


@pytest.mark.campaign("long", gate="share")
def test_a_loader_draws_from_a_generator_of_the_state(tmp_path: Path) -> None:
    def program(run: Path, tick: Callable[[], None]) -> None:
        generator, seen = torch.Generator().manual_seed(1), []
        batches = loader(generator)
        with loop(run, seen=seen, generators=[generator]) as train:
            for _ in train.iter_epochs():
                if not train.resumed_mid_epoch:
                    seen.append(torch.rand((), generator=generator).item())
                for _, [x] in train.iter_steps(batches):
                    seen.append(x.sum().item() + torch.rand((), generator=generator).item())
                    tick()
                tick()

    require_exact(tmp_path, program, 12)


class Noisy(Dataset[Any]):
    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, index: int) -> Any:
        noise = self.rng.normal() if hasattr(self.rng, "normal") else self.rng.gauss(0.0, 1.0)
        return SAMPLES[index] + noise


class Shuffled:
    def __init__(self, lazily: bool) -> None:
        self.rng, self.lazily = np.random.default_rng(3), lazily

    def __len__(self) -> int:
        return len(SAMPLES)

    def __iter__(self) -> Iterator[int]:
        if self.lazily:
            return (int(self.rng.integers(len(SAMPLES))) for _ in SAMPLES)
        return iter(self.rng.permutation(len(SAMPLES)).tolist())


@pytest.mark.campaign("long", gate="share")
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Noisy(np.random.default_rng(5)), 4, shuffle=True),
        lambda: DataLoader(Noisy(np.random.RandomState(5)), 4, sampler=Shuffled(lazily=False)),
        lambda: DataLoader(torch.utils.data.Subset(Noisy(random.Random(5)), range(12)), 4),
        lambda: DataLoader(Noisy(np.random.default_rng(5)), 4, sampler=Shuffled(lazily=True)),
        lambda: everstep.data.loader(Noisy(np.random.default_rng(5)), 4, shuffle=True),
    ],
    ids=["dataset", "sampler", "subset", "lazy sampler", "everstep's loader"],
)
def test_datasets_and_samplers_with_generators_of_their_own(tmp_path: Path, make: Callable[[], Any]) -> None:
    def program(run: Path, tick: Callable[[], None]) -> None:
        batches, seen = make(), []
        with loop(run, seen=seen) as train:
            for _ in train.iter_epochs():
                for _, x in train.iter_steps(batches):
                    seen.append(x.sum().item())
                    tick()

    require_exact(tmp_path, program, 9)


@pytest.mark.parametrize("workers", [False, True])
def test_what_cannot_be_exact_is_said(
    tmp_path: Path, workers: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(steps: int) -> None:
        sampler = Shuffled(lazily=True)
        noisy = Noisy(sampler.rng)  # draws between the sampler's draws
        batches = DataLoader(noisy, 4, sampler=sampler)
        with loop(tmp_path / "run") as train:
            for _ in train.iter_epochs():
                for _ in train.iter_steps(
                    everstep.data.loader(noisy, 4, num_workers=1) if workers else batches
                ):
                    steps -= 1
                    if steps == 0:
                        raise Killed

    for steps in (3, 1):
        with pytest.raises(Killed):
            start(steps)
    assert "cannot resume exactly" in capsys.readouterr().out


# ----------------------------------------------------------------- lines that a resume runs again


@pytest.mark.campaign("long", gate="share")
def test_lines_before_the_steps_draw_the_same_random_numbers_again(tmp_path: Path) -> None:
    def batches() -> list[Any]:
        return [SAMPLES[torch.randperm(12)[:4]] * random.random() for _ in range(2)]

    def program(run: Path, tick: Callable[[], None]) -> None:
        seen: list[float] = []
        with loop(run, seen=seen) as train:
            kept = torch.randperm(12)[:6]
            for _ in train.iter_epochs():
                for _, x in train.iter_steps([*batches(), SAMPLES[kept]], "a"):
                    seen.append(x.sum().item() * random.random())
                    tick()
                for _, x in train.iter_steps(batches(), "b"):
                    seen.append(x.sum().item() * random.random())
                    tick()
                    if random.random() < 0.5:
                        break
                more = batches()
                train.collect_metrics(more=more[0].sum())
                for _, x in train.iter_steps(more, "c"):
                    seen.append(x.sum().item())
                    tick()

    require_exact(tmp_path, program, 18)


@pytest.mark.campaign("long", gate="share")
@pytest.mark.parametrize("left_by", ["limit", "break"])
def test_a_program_with_two_epoch_loops_goes_on_in_the_one_it_was_in(tmp_path: Path, left_by: str) -> None:
    def program(run: Path, tick: Callable[[], None]) -> None:
        seen: list[int] = []
        with loop(run, seen=seen) as train:
            if left_by == "limit":
                train.max_epoch = 2
            for epoch in train.iter_epochs():
                for step, _ in train.iter_steps([0, 1]):
                    seen.append(step)
                    tick()
                if left_by == "break" and epoch == 2:
                    break
            train.max_epoch = 4
            for _ in train.iter_epochs():
                for step, _ in train.iter_steps([0, 1]):
                    seen.append(-step)
                    tick()

    require_exact(tmp_path, program, 8)


def test_the_epoch_loop_of_the_checkpoint_must_be_there(tmp_path: Path) -> None:
    def start(loops: int) -> None:
        with loop(tmp_path / "run") as train:
            for _ in range(loops):
                for _ in train.iter_epochs():
                    for _ in train.iter_steps([0]):
                        if train.epoch == 3:
                            raise Killed
                    break

    with pytest.raises(Killed):
        start(loops=3)
    with pytest.raises(UsageError, match="loop number 3, but the program entered only 1"):
        start(loops=1)


# ------------------------------------------------------------------------------------ plain values


@pytest.mark.campaign("long", gate="share")
def test_what_the_program_holds_of_a_container_of_the_state_stays_in_it(tmp_path: Path) -> None:
    def program(run: Path, tick: Callable[[], None]) -> None:
        state = {
            "deque": deque(maxlen=3),
            "set": set(),
            "bytes": bytearray(),
            "pair": (np.zeros(2), {"last": 0}),
            "list": [[0], {"deep": deque()}],
        }
        last, seen, raw, (total, inner) = state["deque"], state["set"], state["bytes"], state["pair"]
        first, deep = state["list"][0], state["list"][1]["deep"]
        with loop(run, state=state) as train:
            for _ in train.iter_epochs():
                for step, [x] in train.iter_steps(everstep.data.arrays(SAMPLES, batch_size=4, shuffle=True)):
                    last.append(step), seen.add(x.sum().item()), raw.append(step)
                    total += step
                    inner["last"] = step
                    first[0] += step
                    deep.append(step)
                    train.collect_metrics(last=sum(last), total=total[0], deep=len(deep))
                    tick()

    require_exact(tmp_path, program, 9)


@pytest.mark.campaign("long", gate="share")
def test_numpy_scalars_in_the_state_of_a_run_with_an_optimizer(tmp_path: Path) -> None:
    def program(run: Path, tick: Callable[[], None]) -> None:
        model, numbers = torch.nn.Linear(1, 1), {"rate": np.float32(1.0)}
        optimizer = torch.optim.Adam(model.parameters())
        with loop(run, model=model, optimizer=optimizer, numbers=numbers) as train:
            for _ in train.iter_epochs():
                for _, [x] in train.iter_steps(everstep.data.arrays(SAMPLES, batch_size=6)):
                    numbers["rate"] *= np.float32(0.9)
                    optimizer.zero_grad()
                    (model(x).mean() * float(numbers["rate"])).backward()
                    optimizer.step()
                    tick()

    require_exact(tmp_path, program, 6)


# ----------------------------------------------------------------- what a module's state_dict lacks


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            torch.nn.Linear(1, 3),
            torch.nn.BatchNorm1d(3),
            torch.nn.Linear(3, 1),
        )
        self.register_buffer("average", torch.zeros(()), persistent=False)
        self.register_buffer("grown", torch.zeros(0), persistent=False)
        self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = self.average * 0.9 + x.mean()
        self.grown = torch.cat([self.grown, self.average[None]])
        return self.last(self.norm(self.first(x))).mean() * (self.average + self.grown.sum())


@pytest.mark.campaign("long", gate="share")
def test_buffers_modes_and_frozen_parameters_come_back(tmp_path: Path) -> None:
    def program(run: Path, tick: Callable[[], None]) -> None:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        with loop(run, net=net, optimizer=optimizer) as train:
            for epoch in train.iter_epochs():
                if epoch == 2 and not train.resumed_mid_epoch:
                    net.first.requires_grad_(True)
                for step, [x] in train.iter_steps(everstep.data.arrays(SAMPLES, batch_size=4, shuffle=True)):
                    optimizer.zero_grad()
                    net(x).backward()
                    optimizer.step()
                    if step == 4:
                        net.norm.eval()
                    tick()

    require_exact(tmp_path, program, 9)


def test_what_the_program_now_freezes_stays_frozen(tmp_path: Path) -> None:
    for frozen in (False, True):
        net = Net()
        net.last.requires_grad_(not frozen)
        with loop(tmp_path / "run", net=net) as train:
            for _ in train.iter_epochs():
                list(train.iter_steps([0]))
                break
        assert [p.requires_grad for p in net.last.parameters()] == [not frozen] * 2


def test_parts_of_a_model_with_versioned_modules_can_be_chosen(tmp_path: Path) -> None:
    donor, heir = Net(), Net()
    with loop(tmp_path / "donor", net=donor) as train:
        for _ in train.iter_epochs():
            list(train.iter_steps([0]))
    start = everstep.InitFrom(tmp_path / "donor", include="net/first")
    before = heir.last.weight.clone()
    with everstep.TrainLoop(tmp_path / "heir", {"net": heir}, init_from=start, max_epoch=1):
        assert torch.equal(heir.first.weight, donor.first.weight)
        assert torch.equal(heir.last.weight, before)


# -------------------------------------------------------------------------------------- gradients


def watched() -> Any:
    """A model, its optimizer, and a counter of the optimizer's updates."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, optimizer, get("torch").update_counter({"optimizer": optimizer})


def test_a_resume_holds_no_gradients_that_were_used_up() -> None:
    model, optimizer, before = watched()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    saved = before.gradients()
    _, _, after = watched()
    after.load_gradients(saved)
    assert saved == after.gradients() == {"grad": {}, "reused": {"optimizer": [False, False]}}
    before.close(), after.close()


def test_a_resume_after_the_first_update_knows_that_there_was_one() -> None:
    """The second update of all then tells whether gradients are used again, as in an undisturbed run."""

    def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer, undisturbed = watched()
    fresh = undisturbed.gradients()
    update(model, optimizer)
    once = undisturbed.gradients()
    update(model, optimizer)
    for saved, updates in ((fresh, 2), (once, 1)):
        model, optimizer, resumed = watched()
        resumed.load_gradients(saved)
        assert resumed.gradients() == saved
        for _ in range(updates):
            update(model, optimizer)
        assert resumed.gradients() == undisturbed.gradients()
        resumed.close()
    undisturbed.close()
