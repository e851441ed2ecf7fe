"""Law 1 over a zoo of programs: struck at any tick, and started again, each ends as the run that was not.

A row is a program that calls `tick()` wherever it may be struck, and may return what it ends with.  Each has
once come back otherwise than it would have gone on, or could.
"""

from __future__ import annotations

import os
import random
import signal
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import everstep
import gate
from everstep import Every
from everstep.data import arrays
from everstep.errors import DivergenceError, Interrupted, NotResumableError, RestoreError
from everstep.proof.compare import compare_runs
from everstep.torch import Clip, ClipOptimizer
from tiny_runs import Tiny
from tiny_task import Notes, TinyTask, numbers, trainer

Tick = Callable[[], None]
Program = Callable[[Path, Tick], Any]
EACH = Every(steps=1)


class Killed(BaseException):
    """Stands for SIGKILL: after an exception nothing more is saved."""


def kill() -> None:
    raise Killed


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def start(program: Program, run: Path, at: int = 0, strike: Tick = kill) -> tuple[bool, Any]:
    """One start, struck at tick `at`; whether it came to its end, and what it returned, or its ticks."""
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        ticks += 1
        if ticks == at:
            strike()

    try:
        result = program(run, tick)
    except (Killed, Interrupted):
        return False, None
    return True, (result, ticks)


def require_exact(tmp_path: Path, program: Program, declared: Program | None = None) -> list[str]:
    """Strike at each tick, in the gate at three quarters; returns the refusals to go on.

    `declared` is the same program, which goes on where `program` is refused.
    """
    (_, (result, ticks)), refused = start(program, tmp_path / "whole"), list[str]()
    assert ticks > 3
    for at in range(1, ticks + 1) if gate.is_campaign else [3 * ticks // 4]:
        run = tmp_path / f"struck at {at}"
        ended, _ = start(program, run, at, terminate if at % 3 == 0 and gate.is_campaign else kill)
        assert not ended or at == ticks
        try:
            start(program, run, 2, terminate)  # a second time, at once
            ended, again = start(program, run)
        except NotResumableError as error:
            refused.append(str(error))
            if declared is None:
                raise
            ended, again = start(declared, run)
        assert ended and again[0] == result, at
        assert compare_runs(tmp_path / "whole", run) == [], at
    return refused


def loop(run: Path, every: Any = None, services: Any = (), **options: Any) -> everstep.TrainLoop:
    often = everstep.Checkpoints(every or Every(steps=2) | Every(epochs=1))
    options = {"max_epoch": 3, "seed": 1, "default_services": False, "show_eta": False, **options}
    return everstep.TrainLoop(run, services=[often, *services], **options)


def steps(run: Path, tick: Tick, data: Any, every: Any = EACH, **options: Any) -> Iterator[tuple[int, Any]]:
    """Every step of a loop, saved at each; it may be struck at the end of its body."""
    with loop(run, every, **options) as train:
        for _ in train.iter_epochs():
            for step, batch in train.iter_steps(data):
                yield step, batch
                tick()


# ---------------------------------------------------------------------- generators that data keeps

SAMPLES = torch.arange(12.0).reshape(12, 1)


def loader(generator: Any, size: int = 4) -> Any:
    return DataLoader(TensorDataset(SAMPLES), size, shuffle=True, generator=generator)


class Noisy(Dataset[Any]):
    def __init__(self, rng: Any) -> None:
        self.rng, self.other = rng, None

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, index: int) -> Any:
        noise = self.rng.normal() if hasattr(self.rng, "normal") else self.rng.gauss(0.0, 1.0)
        return (SAMPLES[index] + noise,)


class Shuffled:
    def __init__(self, lazily: bool) -> None:
        self.rng, self.lazily = np.random.default_rng(3), lazily

    def __len__(self) -> int:
        return len(SAMPLES)

    def __iter__(self) -> Iterator[int]:
        if self.lazily:
            return (int(self.rng.integers(len(SAMPLES))) for _ in SAMPLES)
        return iter(self.rng.permutation(len(SAMPLES)).tolist())


def seeded(generator: Any, kept: Any, seed: int, draws: int = 0) -> Any:
    generator.manual_seed(seed)
    torch.rand(draws, generator=generator)
    return kept


def drawn(generator: Any, kept: Any) -> Any:
    torch.rand(3, generator=generator)
    return kept


Head = Callable[[Any, Any, int], Any]
"""What a program does at an epoch's head with a generator and its loader: it gives the loader to read."""
HEADS: dict[str, Head] = {
    "nothing": lambda generator, kept, epoch: kept,
    "seeds it anew": lambda generator, kept, epoch: seeded(generator, kept, 100 + epoch),
    "seeds it once": lambda generator, kept, epoch: seeded(generator, kept, 11) if epoch == 2 else kept,
    "a new loader": lambda generator, kept, epoch: loader(torch.Generator().manual_seed(100 + epoch)),
    "a new loader of the generator": lambda generator, kept, epoch: loader(generator),
    "a new dataset": lambda generator, kept, epoch: DataLoader(Noisy(np.random.default_rng(epoch)), 4),
}
"""It can be told from their states, and from the record."""
BLIND: dict[str, Head] = {
    "the same seed": lambda generator, kept, epoch: seeded(generator, kept, 5),
    "draws": lambda generator, kept, epoch: drawn(generator, kept),
    "seeds and draws": lambda generator, kept, epoch: seeded(generator, kept, epoch % 2, 3),
    "odd epochs": lambda generator, kept, epoch: seeded(generator, kept, epoch) if epoch % 2 else kept,
}
"""It cannot be told where the data is not known before."""


def heads(
    run: Path, tick: Tick, head: Head, declared: bool = False, tail: bool = False, **options: Any
) -> Any:
    generator, seen = torch.Generator().manual_seed(7), list[float]()
    kept = loader(generator)
    streams = {"train": kept} if declared else None
    with loop(run, state={"seen": seen}, streams=streams, **options) as train:
        for epoch in train.iter_epochs():
            data = head(generator, kept, epoch)
            for _, (batch,) in train.iter_steps(data):
                seen.extend(batch.flatten().tolist())
                tick()
            if tail and data.generator is not None:  # it draws
                seen.append(float(torch.rand((), generator=data.generator)))
    return seen


def reads(run: Path, tick: Tick, data: dict[str, Any], head: Any = int, tail: Any = None) -> Any:
    """Notes each batch of each epoch's loops; `head` and `tail` are called around them."""
    seen = list[float]()
    with loop(run, state={"seen": seen}) as train:
        for epoch in train.iter_epochs():
            head(epoch)
            for name, batches in data.items():
                for _, (x,) in train.iter_steps(batches, name):
                    seen.append(x.sum().item())
                    tick()
            if tail is not None:
                tail(train, seen)
                tick()
    return seen


def data_with_generators(run: Path, tick: Tick, make: Callable[[], Any]) -> Any:
    return reads(run, tick, {"train": make()})


def exchanges(run: Path, tick: Tick, declared: bool = False, in_state: bool = False, **options: Any) -> Any:
    """The head of each epoch chooses one of two generators that the dataset holds."""
    pair, seen = [np.random.default_rng(1), np.random.default_rng(2)], list[float]()
    dataset = Noisy(pair[0])
    dataset.other = pair[1]
    kept = DataLoader(dataset, 4)
    state = {"seen": seen, **({"first": pair[0], "second": pair[1]} if in_state else {})}
    with loop(run, state=state, streams={"train": kept} if declared else None, **options) as train:
        for epoch in train.iter_epochs():
            dataset.rng, dataset.other = pair[epoch % 2], pair[1 - epoch % 2]
            for _, (batch,) in train.iter_steps(kept):
                seen.extend(batch.flatten().tolist())
                tick()
    return seen


def one_generator() -> Any:
    """The dataset draws between the sampler's draws."""
    sampler = Shuffled(lazily=True)
    return DataLoader(Noisy(sampler.rng), 4, sampler=sampler)


DATA: dict[str, Callable[[], Any]] = {
    "dataset": lambda: DataLoader(Noisy(np.random.default_rng(5)), 4, shuffle=True),
    "sampler": lambda: DataLoader(Noisy(np.random.RandomState(5)), 4, sampler=Shuffled(lazily=False)),
    "subset": lambda: DataLoader(Subset(Noisy(random.Random(5)), range(12)), 4),
    "lazy sampler": lambda: DataLoader(Noisy(np.random.default_rng(5)), 4, sampler=Shuffled(lazily=True)),
    "one generator": lambda: one_generator(),
    "everstep's": lambda: everstep.data.loader(Noisy(np.random.default_rng(5)), 4, shuffle=True),
}


class SeedsEachPass(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        self.rng = torch.Generator().manual_seed(7)
        return ((x + torch.rand((), generator=self.rng),) for x in SAMPLES)


class SeedsEachOrder(Shuffled):
    def __iter__(self) -> Iterator[int]:
        self.rng = np.random.default_rng(7)
        return super().__iter__()


def parts(dataset: Any) -> Any:
    return ConcatDataset([Subset(dataset, range(12))])


PUT_IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "by each head": lambda noisy: DataLoader(parts(noisy), 4, shuffle=True),
    "by each head, everstep's": lambda noisy: everstep.data.loader(parts(noisy), 4, shuffle=True),
    "by each pass": lambda noisy: DataLoader(SeedsEachPass(), 4),
    "by each order": lambda noisy: DataLoader(noisy, 4, sampler=SeedsEachOrder(lazily=True)),
}


def a_generator_put_in_place(run: Path, tick: Tick, make: Callable[[Any], Any]) -> Any:
    """What stands there at a resume is that of its epoch."""
    data = make(noisy := Noisy(None))
    head = lambda epoch: setattr(noisy, "rng", np.random.default_rng(epoch))  # noqa: E731
    return reads(run, tick, {"train": data}, head)


def weights_of_the_state_that_steps_change(run: Path, tick: Tick) -> Any:
    weights, seen = torch.ones(12, dtype=torch.double), list[float]()
    batches = DataLoader(TensorDataset(SAMPLES), 4, sampler=WeightedRandomSampler(weights, 12))
    for _, (x,) in steps(run, tick, batches, state={"seen": seen, "weights": weights}):
        seen.extend(x.flatten().tolist())
        weights[x.flatten().long()] *= 3
    return seen


def a_list_of_the_state_that_steps_change(run: Path, tick: Tick) -> Any:
    """The batch before a resume point cannot come again: the steps have changed it, and it is restored so."""
    batches = [np.full(2, float(at)) for at in range(4)]
    for _, x in steps(run, tick, batches, state={"batches": batches}):
        x *= 2
    return np.stack(batches).tolist()


class ByLoss(torch.utils.data.Sampler[int]):
    def __init__(self) -> None:
        self.weights = torch.ones(len(SAMPLES))

    def __len__(self) -> int:
        return len(SAMPLES)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.multinomial(self.weights, len(self), True).tolist())


def weighted() -> Any:
    return WeightedRandomSampler(torch.ones(len(SAMPLES)), len(SAMPLES))


def a_sampler_whose_weights_the_steps_change(run: Path, tick: Tick, make: Any = ByLoss) -> Any:
    sampler, drawn = make(), everstep.Slot(0.0)
    data = DataLoader(TensorDataset(SAMPLES, torch.arange(len(SAMPLES))), 4, sampler=sampler)
    for step, (x, index) in steps(run, tick, data, state={"drawn": drawn}):
        drawn.value += (x.sum() * (step + 1)).item()
        sampler.weights[index] += x[:, 0].to(sampler.weights)
    return drawn.value


def two_loaders_share_a_generator(run: Path, tick: Tick) -> Any:
    generator = torch.Generator().manual_seed(1)
    return reads(run, tick, {"a": loader(generator), "b": loader(generator)})


def two_loaders_seeded_at_the_head(run: Path, tick: Tick) -> Any:
    """The second is not opened yet where the first loop is saved."""
    first, second = torch.Generator(), torch.Generator()

    def head(epoch: int) -> None:
        first.manual_seed(100 + epoch)
        second.manual_seed(50 + epoch)

    def tail(train: Any, seen: list[float]) -> None:
        tick()
        train.collect_metrics(sum=sum(seen))

    return reads(run, tick, {"train": loader(first), "other": loader(second, 6)}, head, tail)


def an_evaluation_moves_the_generator_of_the_training(run: Path, tick: Tick) -> Any:
    batches = loader(torch.Generator().manual_seed(1))

    def tail(train: Any, seen: list[float]) -> None:
        with train.evaluation():
            train.collect_metrics(first=next(iter(batches))[0][0])

    return reads(run, tick, {"train": batches}, tail=tail)


def a_loader_draws_from_a_generator_of_the_state(run: Path, tick: Tick) -> Any:
    generator, seen = torch.Generator().manual_seed(1), list[float]()
    batches = loader(generator)
    with loop(run, state={"seen": seen, "generators": [generator]}) as train:
        for _ in train.iter_epochs():
            if not train.resumed_mid_epoch:
                seen.append(torch.rand((), generator=generator).item())
            for _, (x,) in train.iter_steps(batches):
                seen.append(x.sum().item() + torch.rand((), generator=generator).item())
                tick()
            tick()
    return seen


# ----------------------------------------------------------------- lines that a resume runs again


def lines_between_step_loops(run: Path, tick: Tick) -> Any:
    def batches() -> list[Any]:
        return [SAMPLES[torch.randperm(12)[:4]] * random.random() for _ in range(2)]

    seen = list[float]()
    with loop(run, state={"seen": seen}) as train:
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
    return seen


def lines_before_the_loops(run: Path, tick: Tick) -> Any:
    """They change the state, and draw from generators of the state."""
    python, numpy, own = random.Random(3), np.random.default_rng(3), torch.Generator().manual_seed(3)
    model, order, seen = torch.nn.Linear(3, 1), [0, 1, 2], list[list[int]]()
    state = {"model": model, "generators": [python, numpy, own], "order": order, "seen": seen}
    with loop(run, state=state) as train:
        torch.nn.init.normal_(model.weight, generator=own)
        python.shuffle(order)
        offset = int(numpy.integers(100))
        for _ in train.iter_epochs():
            permutation = torch.randperm(6, generator=own)
            scale = float(numpy.random()) + python.random()
            for step, batch in train.iter_steps([permutation[i : i + 2] for i in range(0, 6, 2)]):
                with torch.no_grad():
                    model.weight += scale * torch.rand(1, 3, generator=own) + offset
                seen.append([step, *batch.tolist(), *order])
                tick()
            train.collect_metrics(weight=float(model.weight.detach().sum()), offset=offset)
    return seen


def lines_before_a_supervisors_loop(run: Path, tick: Tick) -> Any:
    state = {"w": np.zeros(2), "generator": np.random.default_rng(5)}
    services = [everstep.Checkpoints(Every(steps=2))]
    with everstep.Supervisor(run, state, max_step=8, services=services, seed=1) as sv:
        state["w"] += state["generator"].random(2)
        batches = sv.stream([1.0, 2.0, 3.0])
        while not sv.should_stop():
            state["w"] *= next(batches) + state["generator"].random()
            tick()
            sv.advance(w=float(state["w"].sum()))
    return float(state["w"].sum())


def passes_of_a_supervisor(run: Path, tick: Tick, every: Any) -> Any:
    w, services = np.zeros(3), [everstep.Checkpoints(every)]
    with everstep.Supervisor(run, {"w": w}, services=services, seed=1) as sv:
        batches = sv.stream(arrays(np.arange(10), batch_size=2, shuffle=True), passes=2)
        while not sv.should_stop():
            w *= 0.9
            w += next(batches)[0].mean() + np.random.standard_normal(3)
            tick()
            sv.advance(w=float(w.sum()))
    return w.tobytes()


def a_head_that_changes_the_state(run: Path, tick: Tick) -> Any:
    """A resume inside the epoch does it again; in the state it is done once."""
    model, order = torch.nn.Linear(3, 1), list(range(6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with loop(run, EACH, state={"model": model, "optimizer": optimizer, "order": order}) as train:
        for _ in train.iter_epochs():
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            with torch.no_grad():
                model.weight += 0.1 * torch.randn(1, 3)
            order.append(order.pop(0))
            optimizer.zero_grad()
            for step, (x,) in train.iter_steps(arrays(np.ones((6, 3), np.float32), batch_size=2)):
                model(torch.from_numpy(x)).sum().backward()
                if step % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                tick()
    return order


def names_of_the_step_loop_in_the_tail(run: Path, tick: Tick, batch_size: int, **limits: int) -> Any:
    data = arrays(np.arange(18.0).reshape(6, 3), batch_size=batch_size, shuffle=True)
    w = np.zeros(3)
    with loop(run, state={"w": w}, **limits) as train:
        for _ in train.iter_epochs():
            for step, (x,) in train.iter_steps(data):  # noqa: B007
                loss = float(((w - x) ** 2).sum())
                w *= 0.9
                w += 0.1 * x.mean(0) + 0.01 * np.random.rand(3)
                tick()
            train.collect_metrics(last_loss=loss, last_step=step)
            tick()
            train.collect_metrics(after=loss)
    return w.tobytes()


def a_second_step_loop(run: Path, tick: Tick, steps: int) -> Any:
    first, second = arrays(np.arange(6.0), batch_size=2), arrays(np.arange(steps + 0.0), batch_size=1)
    w, b = np.zeros(1), np.zeros(1)
    with loop(run, EACH, state={"w": w}) as train:
        for epoch in train.iter_epochs():
            train.collect_metrics(lr=0.1 * epoch)
            for _, (a,) in train.iter_steps(first):
                w += a.sum()
                tick()
            train.print_logs()
            train.collect_metrics(between=w[0])
            tick()
            for _, (b,) in train.iter_steps(second, "second"):
                w *= 1 + b.sum()
                train.collect_metrics(inside=w[0])
                tick()
            tick()
            train.collect_metrics(last=b.sum())
    return w.tobytes()


def two_epoch_loops(run: Path, tick: Tick, left_by: str) -> Any:
    seen = list[int]()
    with loop(run, state={"seen": seen}) as train:
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
    assert [abs(step) for step in seen] == list(range(1, 9))
    return seen


def left_by_break(run: Path, tick: Tick) -> Any:
    tiny = Tiny(run, max_epoch=4, services=[everstep.Checkpoints(Every(steps=2))])
    with tiny.loop as train:
        for epoch in train.iter_epochs():
            for step, (ids,) in train.iter_steps(tiny.data):
                tiny.update(ids)
                tick()
                if step % 4 == 3 - epoch % 2:
                    break
            train.collect_metrics(valid_loss=float(tiny.w.sum()))
    return tiny.w.tobytes()


def a_pass_over_several_epochs(run: Path, tick: Tick) -> Any:
    saves = everstep.Checkpoints(EACH)
    tiny, data = Tiny(run, steps_per_epoch=3, max_epoch=4, services=[saves]), [0, 1, 2, 3, 4]
    with tiny.loop as train:
        for _ in train.iter_epochs():
            for _, batch in train.iter_steps(data):
                tiny.update(np.array([batch]))
                tick()
    return tiny.w.tobytes()


def data_that_fails(run: Path, tick: Tick) -> Any:
    class Data(list[Any]):
        def __getitem__(self, number: Any) -> Any:
            tick()
            return np.array([number, number + 1])

    tiny = Tiny(run, max_epoch=2, services=[everstep.Checkpoints(EACH)])
    data = Data(range(4))
    with tiny.loop as train:
        for _ in train.iter_epochs():
            for _, ids in train.iter_steps(data):
                tiny.update(ids)
    return tiny.w.tobytes()


VALUES = [5.0, 4.0, 4.5, 3.0, 3.5, 3.2, 3.1, 1.0]


def an_early_stop_with_the_best_restored(run: Path, tick: Tick) -> Any:
    best = everstep.Best("valid_loss", restore_at_end=True)
    stop = everstep.EarlyStop("valid_loss", patience=3)
    tiny = Tiny(run, max_epoch=8, services=[best, stop])

    def tail(train: Any, epoch: int) -> None:
        train.collect_metrics(valid_loss=VALUES[epoch - 1])
        tick()

    tiny.train(inside=lambda train, step: tick(), tail=tail)
    assert (tiny.loop.epoch, tiny.loop.best_valid_metric) == (7, 3.0)
    return tiny.w.tobytes(), tiny.momentum.tobytes()


class Ticking(TinyTask):
    """May be struck in each of its calls; the number of its epoch is a metric of each step and evaluation."""

    def __init__(self, tick: Tick) -> None:
        super().__init__()
        self.tick, self.begun = tick, Notes()

    def train_loop_begin(self) -> None:
        self.tick()
        self.begun.append(self.epoch)

    def train_step(self, batch: Any) -> Any:
        self.tick()
        return {**super().train_step(batch), "epoch": self.begun[-1]}

    def train_loop_end(self) -> Any:
        self.tick()
        return {"weight": self.w[0]}

    def eval_step(self, batch: Any) -> Any:
        self.tick()
        return {**super().eval_step(batch), "epoch": self.epoch}


def a_trainer(run: Path, tick: Tick, every: Any, **options: Any) -> Any:
    services = [
        everstep.Evaluate("valid", Every(steps=3) | Every(epochs=1), validate_first=True),
        everstep.EarlyStop("valid/loss", patience=9),
        everstep.Best("valid/loss"),
        everstep.Checkpoints(every),
    ]
    trainer(run, task := Ticking(tick), services=services, **options).run_training()
    return task.w.tobytes(), task.epoch


def evaluations_in_an_epoch_of_ones_own(run: Path, tick: Tick) -> Any:
    door = trainer(run, task := Ticking(tick), services=[everstep.Evaluate("test", everstep.Never())])
    with door.open() as train:
        for _ in train.iter_epochs():
            door.epoch("train", "valid")
    return task.w.tobytes()


class Averaged(everstep.torch.Task):
    """With dropout, noise and an average of its weights; may be struck in any batch."""

    tick: Tick

    def build_model(self) -> Any:
        return torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))

    def build_optimizer(self, model: Any) -> Any:
        return torch.optim.Adam(model.parameters())

    def forward(self, batch: Any) -> Any:
        self.tick()
        (x,) = batch
        return {"loss": self.model(x + 0.1 * torch.randn(x.shape)).square().mean()}


class Scheduled(Averaged):
    scheduler_interval = "update"

    def build_scheduler(self, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


class Several(Averaged):
    """Steps optimizers by name, one of which clips."""

    def build_optimizer(self, model: Any) -> Any:
        rest = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
        return {"head": torch.optim.AdamW(model[2].parameters()), "rest": ClipOptimizer(rest)}

    def train_step(self, batch: Any) -> Any:
        metrics = self.forward(batch)
        self.backward(metrics["loss"])
        for optimizer in self.optimizer.values():
            optimizer.step()
            optimizer.zero_grad()
        return {**metrics, **self.optimizer["rest"].metrics()}


TASKS: dict[str, Callable[[], Averaged]] = {
    "an average": lambda: Averaged(ema=0.5),
    "all of it": lambda: Scheduled(accumulate=2, autocast=torch.float16, ema=0.8, clip=Clip(global_norm=1.0)),
    "several optimizers": lambda: Several(),
}


def a_task_with_a_dataloader(run: Path, tick: Tick, make: Callable[[], Averaged]) -> Any:
    task = make()
    task.tick = tick
    streams = {name: DataLoader(TensorDataset(SAMPLES), 5, shuffle=True) for name in ("train", "valid")}
    services = [everstep.Evaluate("valid", Every(steps=3) | Every(epochs=1)), everstep.Checkpoints(EACH)]
    trainer(run, task, streams=streams, services=services).run_training()
    return [each.tolist() for each in task.model.parameters()]


# ----------------------------------------------------------------------------- values of the state


def what_is_held_of_containers(run: Path, tick: Tick) -> Any:
    pair, nested = (np.zeros(2), {"last": 0}), [[0], {"deep": deque()}]
    last, seen, raw, rate = deque[int](maxlen=3), set[float](), bytearray(), {"numpy": np.float32(1.0)}
    state: Any = {"deque": last, "set": seen, "bytes": raw, "pair": pair, "list": nested, "rate": rate}
    (total, inner), (first, deep) = pair, (nested[0], nested[1]["deep"])
    data, total_rate = arrays(SAMPLES, batch_size=4, shuffle=True), list[Any]()
    for step, (x,) in steps(run, tick, data, None, state={"all": state, "sums": total_rate}):
        last.append(step), seen.add(x.sum().item()), raw.append(step)
        total += step
        inner["last"] = step
        first[0] += step
        deep.append(step)
        state["rate"]["numpy"] *= np.float32(0.9)
        total_rate.append([sum(last), total[0], len(deep)])
    return list(last), seen, raw, total.tolist(), inner, first, list(deep), rate, total_rate


def add_to_dict(value: Any, step: int) -> None:
    value[step % 3] = value.get(step % 3, 0) + step


IN_A_SLOT: dict[str, tuple[Callable[[], Any], Callable[[Any, int], object]]] = {
    "deque": (lambda: deque([0], maxlen=3), lambda value, step: value.append(step)),
    "list": (list, lambda value, step: value.append((step, value[-1:]))),
    "dict": (dict, add_to_dict),
    "nested": (lambda: {"window": deque()}, lambda value, step: value["window"].append(step)),
    "set": (set, lambda value, step: value.add(step * step % 11)),
    "bytearray": (bytearray, lambda value, step: value.append(step)),
    "array": (lambda: np.zeros(2), lambda value, step: value.__iadd__(step)),
    "tensor": (lambda: torch.zeros(2), lambda value, step: value.add_(step)),
}


def a_slots_value_changed_by_its_own_name(run: Path, tick: Tick, kind: str, inside: bool = False) -> Any:
    make, change = IN_A_SLOT[kind]
    slot = everstep.Slot(value := make())
    state = {"all": {"slot": slot}} if inside else {"slot": slot}
    for step, _ in steps(run, tick, [0, 1, 2, 3], state=state):
        change(value, step)
    assert slot.value is value
    return repr(value)


def a_slots_value_replaced(run: Path, tick: Tick, first: Any, replace: Any) -> Any:
    """The first one, which the program still has, stays as it is."""
    slot = everstep.Slot(first)
    for step, _ in steps(run, tick, [0, 1, 2, 3], state={"slot": slot}):
        slot.value = replace(slot.value, step)
    return slot.value, repr(first)


def a_slot_assigned_where_lines_run_again(run: Path, tick: Tick, at_the_head: bool) -> Any:
    slot = everstep.Slot([]) if at_the_head else everstep.Slot()
    with loop(run, EACH, state={"slot": slot}) as train:
        slot.value = values = list[int]()
        for _ in train.iter_epochs():
            if at_the_head:
                slot.value = values = list[int]()
            for step, _ in train.iter_steps([0, 1, 2, 3]):
                values.append(step)
                tick()
        assert slot.value is values
    return values


def a_replay_memory(run: Path, tick: Tick) -> Any:
    memory = everstep.data.RingBuffer(12, {"x": ("float32", (2,)), "n": "int64"})
    draws, weights, seen = np.random.default_rng(5), np.zeros(2), list[int]()
    state = {"memory": everstep.PerRank(memory), "draws": draws, "w": weights, "seen": seen}
    for step, (ids,) in steps(run, tick, arrays(np.arange(12), batch_size=3, shuffle=True), state=state):
        memory.extend(x=np.stack([ids, ids], 1), n=ids)
        batch = memory.sample(4, draws)
        weights += batch["x"].sum(0)
        memory.update([0], n=[step])
        seen += batch["n"].tolist()
    return weights.tolist(), seen


class Net(torch.nn.Module):
    """With what a module's state_dict lacks: buffers that are not persistent, modes, frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(1, 3), torch.nn.BatchNorm1d(3)
        self.last = torch.nn.Linear(3, 1)
        self.register_buffer("average", torch.zeros(()), persistent=False)
        self.register_buffer("grown", torch.zeros(0), persistent=False)
        self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = self.average * 0.9 + x.mean()
        self.grown = torch.cat([self.grown, self.average[None]])
        return self.last(self.norm(self.first(x))).mean() * (self.average + self.grown.sum())


def buffers_modes_and_frozen_parameters(run: Path, tick: Tick) -> Any:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    with loop(run, state={"net": net, "optimizer": optimizer}) as train:
        for epoch in train.iter_epochs():
            if epoch == 2 and not train.resumed_mid_epoch:
                net.first.requires_grad_(True)
            for step, (x,) in train.iter_steps(arrays(SAMPLES, batch_size=4, shuffle=True)):
                optimizer.zero_grad()
                net(x).backward()
                optimizer.step()
                if step == 4:
                    net.norm.eval()
                tick()
    return net.last.bias.item(), net.norm.training, net.first.weight.requires_grad


class Memory(torch.nn.Module):
    """With tensors and containers under two names, buffers that come and go, an attribute that goes."""

    def __init__(self, other: Any = None) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("hidden", None, persistent=False)
        self.register_buffer("scale", None)
        self.register_buffer("first", torch.ones(1), persistent=False)
        self.register_buffer("second", torch.ones(1))
        self.view, self.views = self.mean.expand(3), [self.mean[None]]
        self.bank = torch.zeros(2) if other is None else other.bank
        self.list: list[float] = [] if other is None else other.list
        self.array = np.zeros(2)
        self.seen = torch.from_numpy(self.array)
        self.past, self.warm = torch.zeros(1), True


def filled(memory: Memory, name: str, x: torch.Tensor) -> torch.Tensor:
    old = getattr(memory, name)
    setattr(memory, name, x if old is None else old + x)
    return getattr(memory, name)  # type: ignore[no-any-return]


def emptied(memory: Memory, name: str, x: torch.Tensor) -> Any:
    was_there = getattr(memory, name) is not None
    setattr(memory, name, None)
    return x if was_there else 0


MEMORIES: dict[str, Callable[[Memory, Memory, torch.Tensor], Any]] = {
    "a view of a buffer": lambda one, _, x: (one.mean.mul_(0.9).add_(x), one.view.sum())[-1],
    "a view in a list": lambda one, _, x: (one.views[0].mul_(0.9).add_(x), one.mean)[-1],
    "a shared tensor": lambda one, two, x: (one.bank.add_(x), two.bank.sum())[-1],
    "a shared list": lambda one, two, x: (one.list.append(x.item()), sum(two.list))[-1],
    "an array and its tensor": lambda one, _, x: (np.add(one.array, x.item(), one.array), one.seen.sum())[-1],
    "a tensor written through its data": lambda one, _, x: (one.past.data.add_(x), one.past)[-1],
    "buffers that are filled": lambda one, _, x: sum(filled(one, name, x) for name in ("hidden", "scale")),
    "buffers that are emptied": lambda one, _, x: sum(emptied(one, name, x) for name in ("first", "second")),
    "an attribute that is deleted": lambda one, _, x: (
        (x, delattr(one, "warm"))[0] if hasattr(one, "warm") else 0
    ),
}


def memories(run: Path, tick: Tick, name: str) -> Any:
    net = torch.nn.ModuleDict({"one": (one := Memory()), "two": Memory(one), "last": torch.nn.Linear(1, 1)})
    optimizer = torch.optim.SGD(net["last"].parameters(), 1e-2)
    data, state = arrays(SAMPLES, batch_size=4, shuffle=True), {"net": net, "optimizer": optimizer}
    for _, (x,) in steps(run, tick, data, Every(steps=2), state=state):
        optimizer.zero_grad()
        read = torch.as_tensor(MEMORIES[name](net["one"], net["two"], x.mean(0)))
        net["last"](read.detach().float().reshape(1)).square().sum().backward()
        optimizer.step()
    return net["last"].weight.item(), net["last"].bias.item()


class Flat(torch.optim.SGD):
    """Its parameters are views of one tensor, which alone is stepped."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1)
        own = self.param_groups[0]["params"]
        self.flat = torch.cat([each.detach().reshape(-1) for each in own])
        for each, view in zip(own, self.flat.split([p.numel() for p in own]), strict=True):
            each.data = view.view_as(each)

    def step(self, closure: Any = None) -> None:
        grads = [each.grad.reshape(-1) for each in self.param_groups[0]["params"]]
        self.flat.sub_(torch.cat(grads), alpha=0.1)


def parameters_in_order(run: Path, tick: Tick, make: Any, again: Any = list) -> Any:
    """In another order, perhaps, when it starts again, as a set of names gives; gradients are summed."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(3)))
    named = list(model.named_parameters())
    optimizer = make(list(again(named)) if (run / "run.json").exists() else named)
    state = {"model": model, "optimizer": optimizer}
    for step, (x,) in steps(run, tick, arrays(SAMPLES, batch_size=4), state=state):
        (model(x).square().mean() + 3 * model[0].weight.sum() + model[1].bias.sum()).backward()
        if step % 2 == 0:
            optimizer.step(lambda: 0.0)
            optimizer.zero_grad()
    (group,) = optimizer.param_groups
    pairs = zip(group["param_names"], group["params"], strict=True)
    assert all(model.get_parameter(name) is parameter for name, parameter in pairs)
    return [each.item() for each in model.parameters()]


def gradients(run: Path, tick: Tick, zero: str) -> Any:
    """Used up by each update, or by every second, or by two; zeroed before it, or after it, or in part."""
    model = torch.nn.Linear(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = {"model": model, "optimizer": optimizer}
    for step, (x,) in steps(run, tick, arrays(SAMPLES, batch_size=3), state=state, max_epoch=2):
        if zero == "before" or (zero == "before every second" and step % 2):
            optimizer.zero_grad()
        model(x).square().mean().backward()
        if zero != "after two" or step % 2 == 0:
            optimizer.step()
            if zero == "in part":
                model.weight.grad = None
            elif not zero.startswith("before"):
                optimizer.zero_grad()
    return model.weight.sum().item()


OF_HEADS: dict[str, Program] = {
    **{f"head: {name}": partial(heads, head=head) for name, head in HEADS.items()},
    **{f"head: {name}, tail draws": partial(heads, head=head, every=EACH, tail=True)
       for name, head in HEADS.items()},
    **{f"declared, head: {name}": partial(heads, head=head, declared=True) for name, head in BLIND.items()},
    "a pass over epochs": partial(heads, head=HEADS["nothing"], steps_per_epoch=2, max_epoch=6),
    "declared, a pass over epochs": partial(heads, head=BLIND["draws"], declared=True, every=Every(epochs=1),
                                            steps_per_epoch=2, max_epoch=6),
}  # fmt: skip

NAMED: tuple[Program, ...] = (
    weights_of_the_state_that_steps_change, a_list_of_the_state_that_steps_change,
    a_sampler_whose_weights_the_steps_change, two_loaders_share_a_generator, two_loaders_seeded_at_the_head,
    an_evaluation_moves_the_generator_of_the_training, a_loader_draws_from_a_generator_of_the_state,
    lines_between_step_loops, lines_before_the_loops, lines_before_a_supervisors_loop,
    a_head_that_changes_the_state, left_by_break, a_pass_over_several_epochs, data_that_fails,
    evaluations_in_an_epoch_of_ones_own, an_early_stop_with_the_best_restored,
    what_is_held_of_containers, buffers_modes_and_frozen_parameters,
    a_replay_memory,
)  # fmt: skip
CADENCES = (Every(steps=3), EACH, everstep.Never())
ZEROED = ("before", "before every second", "after", "after two", "in part")
IN_THE_TAIL = {
    "": {"batch_size": 2}, ", one step": {"batch_size": 6}, ", a limit": {"batch_size": 1, "max_step": 4},
}  # fmt: skip

ZOO: dict[str, Program] = {
    **{f"a generator put in place {by}": partial(a_generator_put_in_place, make=make)
       for by, make in PUT_IN_PLACE.items()},
    **{f"data: {name}": partial(data_with_generators, make=make) for name, make in DATA.items()},
    **{f"names in the tail{name}": partial(names_of_the_step_loop_in_the_tail, **options)
       for name, options in IN_THE_TAIL.items()},
    **{f"second loop of {steps} steps": partial(a_second_step_loop, steps=steps) for steps in (1, 2)},
    **{f"two epoch loops, by {end}": partial(two_epoch_loops, left_by=end) for end in ("limit", "break")},
    **{f"gradients zeroed {zero}": partial(gradients, zero=zero) for zero in ZEROED},
    "parameters that are views of one tensor": partial(parameters_in_order, make=Flat),
    **{name: partial(memories, name=name) for name in MEMORIES},
    **{f"a task with {name}": partial(a_task_with_a_dataloader, make=make) for name, make in TASKS.items()},
    **{f"a trainer, saved {every}": partial(a_trainer, every=every) for every in CADENCES},
    **{f"a supervisor, saved {every}": partial(passes_of_a_supervisor, every=every) for every in CADENCES},
    "a trainer whose epochs end inside passes": partial(
        a_trainer, every=Every(steps=3), streams={"train": numbers(5, 1)}, steps_per_epoch=3),
    **{f"slot: {kind}": partial(a_slots_value_changed_by_its_own_name, kind=kind) for kind in IN_A_SLOT},
    "slot inside a dict": partial(a_slots_value_changed_by_its_own_name, kind="deque", inside=True),
    **{f"slot: {name} replaced": partial(a_slots_value_replaced, first=first, replace=replace)
       for name, first, replace in (("a list", [7], lambda value, step: [*value, step]),
                                    ("a number", np.float64(2.5), lambda value, step: 2.5))},
    **{f"slot assigned at the head: {at}": partial(a_slot_assigned_where_lines_run_again, at_the_head=at)
       for at in (False, True)},
    "a sampler of torch's": partial(a_sampler_whose_weights_the_steps_change, make=weighted),
    **{program.__name__.replace("_", " "): program for program in NAMED},
}  # fmt: skip


@pytest.mark.campaign("long", gate="share")
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.filterwarnings("ignore:the sampler SeedsEachOrder changes its attribute")
def test_struck_at_any_tick_it_ends_the_same(tmp_path: Path, name: str) -> None:
    assert require_exact(tmp_path, ZOO[name]) == []


@pytest.mark.campaign("long", gate=5)
@pytest.mark.parametrize("at", [3, 4])
def test_parameters_in_another_order_keep_their_state(tmp_path: Path, at: int) -> None:
    program = partial(parameters_in_order, make=torch.optim.Adam, again=reversed)
    assert not start(program, tmp_path / "struck", at, terminate)[0]
    assert start(program, tmp_path / "struck")[1][0] == start(program, tmp_path / "whole")[1][0]


@pytest.mark.parametrize("make", [Flat, torch.optim.LBFGS])
def test_another_order_is_refused_where_one_tensor_is_for_all(tmp_path: Path, make: Any) -> None:
    program = partial(parameters_in_order, make=make, again=reversed)
    assert not start(program, tmp_path, 3, terminate)[0]
    with pytest.raises(RestoreError, match="is parameter 0, and was parameter 5"):
        start(program, tmp_path)


@pytest.mark.parametrize("name", OF_HEADS)
def test_struck_where_a_head_does_something_to_a_generator(tmp_path: Path, name: str) -> None:
    assert require_exact(tmp_path, OF_HEADS[name]) == []


# ----------------------------------------------------------------------- what a resume cannot tell


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("name", BLIND)
def test_data_that_is_not_declared_is_refused_where_a_head_cannot_be_told(tmp_path: Path, name: str) -> None:
    program = partial(heads, head=BLIND[name], every=Every(epochs=1))
    refused = require_exact(tmp_path, program, partial(program, declared=True))
    assert refused
    assert all("declare the data where the loop is made, streams={'train': data}" in each for each in refused)


def test_generators_that_change_places_belong_in_the_state(tmp_path: Path) -> None:
    program = partial(exchanges, every=Every(epochs=1))
    start(program, tmp_path / "plain", 5)
    with pytest.raises(NotResumableError, match="or add the generator to state"):
        start(program, tmp_path / "plain")
    (tmp_path / "state").mkdir()
    assert require_exact(tmp_path / "state", partial(program, in_state=True)) == []
    with pytest.raises(NotResumableError, match=r"change places, .*add them to state"):
        start(partial(program, declared=True), tmp_path / "declared")


def test_another_loader_that_looks_the_same_is_not_taken_for_it(tmp_path: Path) -> None:
    """It lives in this process; the one that is read is made at the head of each epoch."""
    look_alike = loader(torch.Generator().manual_seed(3))
    before = look_alike.generator.get_state()
    require_exact(tmp_path, partial(heads, head=HEADS["a new loader"]))
    assert torch.equal(look_alike.generator.get_state(), before)


def test_what_cannot_be_exact_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def program(run: Path, tick: Tick) -> None:
        data = everstep.data.loader(Noisy(np.random.default_rng(3)), 4, num_workers=1)
        for _ in steps(run, tick, data, None, state={}):
            pass

    for at in (3, 1):
        start(program, tmp_path / "run", at)
    assert "cannot resume exactly" in capsys.readouterr().out


def drawing(run: Path, streams: bool = False, state: Any = None, last: int = 0) -> str:
    """What is printed by a program whose heads draw from its loader's generator, killed at the last one."""
    generator, lines = torch.Generator().manual_seed(7), list[str]()
    kept = loader(generator)
    services = [everstep.services.Console(sink=lines.append)]
    more = {"streams": {"train": kept}} if streams else {}
    state = {"generator": generator} if state else {}
    with loop(run, Every(epochs=1), services, state=state, **more) as train:
        for epoch in train.iter_epochs():
            if epoch == last:
                raise Killed
            for _ in train.iter_steps(drawn(generator, kept)):
                pass
    return "\n".join(lines)


def test_a_head_that_draws_from_the_generator_of_a_loader_is_told(tmp_path: Path) -> None:
    said = "draw from its generator, so a resume"
    assert drawing(tmp_path / "a").count(said) == 1
    assert said not in drawing(tmp_path / "b", state=True)
    assert said not in drawing(tmp_path / "c", streams=True)
    with pytest.raises(Killed):  # the record knows nothing of heads yet
        drawing(tmp_path / "run", last=2)
    assert "not yet recorded that lines at the head of an epoch" in drawing(tmp_path / "run")


@pytest.mark.parametrize("declared", [False, True])
def test_a_head_that_seeds_for_the_first_time_after_a_kill_in_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], declared: bool
) -> None:
    def train(run: Path, killed_in: int = 0, seeded_in: int = 3) -> Any:
        generator = torch.Generator().manual_seed(7)
        kept = loader(generator)
        streams = {"train": kept} if declared else None
        with loop(run, Every(epochs=1), streams=streams) as train:
            for epoch in train.iter_epochs():
                if epoch == killed_in:
                    raise Killed
                if epoch == seeded_in:
                    generator.manual_seed(1)
                for _ in train.iter_steps(kept):
                    pass
        return train.ending.digest

    for name, seeded_in in (("seeds", 3), ("does not", 0)):
        with pytest.raises(Killed):
            train(tmp_path / name, 3, seeded_in)
        is_exact = train(tmp_path / name, 0, seeded_in) == train(tmp_path / f"{name}, whole", 0, seeded_in)
        is_told = "no earlier head of an epoch has set it" in capsys.readouterr().out
        assert (is_exact, is_told) == ((declared or not seeded_in), (bool(seeded_in) and not declared))


@pytest.mark.parametrize("kind", ["arrays", "loader", "list", "sampler", "attribute", "tail", "state"])
def test_data_that_the_training_makes_is_told_where_a_resume_makes_it_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    labels = torch.zeros(12)

    def program(run: Path, tick: Tick) -> None:
        weight = torch.zeros(1)
        labels.zero_()
        kept = TensorDataset(SAMPLES, labels)

        def made(epoch: int) -> Any:
            predicted = (torch.arange(12) > 10) * weight  # the last sample alone: no batch before has it
            if kind == "arrays":
                return everstep.data.arrays(SAMPLES, predicted, batch_size=4)
            if kind == "loader":
                return DataLoader(TensorDataset(SAMPLES, predicted), 4)
            if kind == "list":
                return list(zip(SAMPLES.split(4), predicted.split(4), strict=True))
            if kind == "sampler":
                chosen = [*range(8), *([11] * 4 if weight % 3 else range(8, 12))]
                return DataLoader(kept, batch_sampler=[chosen[:4], chosen[4:8], chosen[8:]])
            if kind == "attribute":
                kept.tensors = (SAMPLES, predicted)
            if kind == "state":
                labels.copy_(predicted)
            return DataLoader(kept, 4)

        with loop(run, state={"weight": weight, "labels": labels}) as train:
            for epoch in train.iter_epochs():
                data = made(epoch)
                for _, _ in train.iter_steps(data):
                    weight += 1
                    tick()
                if kind == "tail":
                    kept.tensors = (SAMPLES, torch.full((12,), weight.item()))
                    tick()

    for at in (4, 5) if kind == "tail" else (5, 8):  # in the tail, and in a pass
        run = tmp_path / str(at)
        assert not start(program, run, at, terminate)[0]
        capsys.readouterr()
        told = False
        try:
            assert start(program, run)[0]
        except DivergenceError as error:  # of the step after the save
            told = "batch of train was the batch with digest" in str(error)
        printed = capsys.readouterr()
        told = told or "batch of train was of data with digest" in printed.out + printed.err
        assert told == (kind != "state"), (at, printed.out)


@pytest.mark.parametrize("in_state", [True, False])
@pytest.mark.parametrize("ticks", [[2], [5], [4, 2]], ids=str)
def test_a_sampler_that_each_head_makes_of_the_state_is_no_other_data(
    tmp_path: Path, ticks: list[int], in_state: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def program(run: Path, tick: Tick) -> None:
        weights, data = torch.ones(12), TensorDataset(SAMPLES, torch.arange(12))
        state = {"weights": weights} if in_state else {}
        with loop(run, Every(epochs=1), state=state, max_epoch=4, on_divergence="stop") as train:
            for _ in train.iter_epochs():
                sampler = WeightedRandomSampler(weights / weights.sum(), 12)
                for _, (x, index) in train.iter_steps(DataLoader(data, 4, sampler=sampler)):
                    weights[index] += x[:, 0]
                    tick()

    for number, at in enumerate(ticks, 1):
        ended, _ = start(program, tmp_path, at, kill if number < len(ticks) else terminate)
        assert not ended
    capsys.readouterr()
    assert start(program, tmp_path)[0]
    assert ("weights (another value)" in capsys.readouterr().out) != in_state


class Caching(Dataset[Any]):
    def __init__(self, kind: str) -> None:
        self.kind, self.targets, self.listed = kind, [n % 3 for n in range(12)], [None] * 12
        self.named, self.times, self.counts = dict[str, Any](), list[float](), np.zeros(12, dtype=int)
        self.samples, self.flags = SAMPLES.clone(), np.zeros(12, dtype=bool)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if self.kind == "names":
            self.named[f"{index}.png"] = SAMPLES[index]
        elif self.kind == "list":
            self.listed[index] = SAMPLES[index]  # type: ignore[call-overload]
        elif self.kind == "counts":
            self.counts[index] += 1
        elif self.kind == "times":
            self.times.append(float(index))
        elif not self.flags[index]:
            self.samples[index] -= 1
            self.flags[index] = True
        return self.samples[index]


@pytest.mark.parametrize("kind", ["names", "list", "counts", "times", "normalised"])
@pytest.mark.parametrize("given", [DataLoader, everstep.data.loader])
def test_data_that_changes_as_it_is_read_is_not_told_as_other_data(tmp_path, capsys, kind, given) -> None:
    def program(run: Path, tick: Tick) -> None:
        data, total = given(Caching(kind), batch_size=4, shuffle=True), torch.zeros(1)
        with loop(run, state={"total": total}) as train:
            for _ in train.iter_epochs():
                for _, batch in train.iter_steps(data):
                    total += batch.sum()
                    tick()
                tick()

    for at in (2, 8, 10):  # in the first pass, between passes, and in the last
        run = tmp_path / str(at)
        assert not start(program, run, at, terminate)[0]
        capsys.readouterr()
        start(program, run, 2, terminate)  # what the first start noted is known to the third
        assert start(program, run)[0]
        printed = capsys.readouterr()
        assert "with digest" not in printed.out + printed.err, at


def test_weights_set_between_two_passes_choose_the_samples_of_the_next(tmp_path: Path) -> None:
    def program(run: Path, tick: Tick, *, heads: set[int], tails: bool) -> list[float]:
        seen, sampler = list[float](), weighted()
        data = DataLoader(TensorDataset(SAMPLES), 4, sampler=sampler)

        def mine() -> None:  # another tensor
            sampler.weights = (torch.arange(12) == sum(seen) % 12).double() + 0.01

        with loop(run, Every(epochs=1), state={"seen": seen}) as train:
            for epoch in train.iter_epochs():
                if epoch in heads:
                    mine()
                for _, (x,) in train.iter_steps(data):
                    seen.extend(x.flatten().tolist())
                    tick()
                if tails:
                    mine()
        return seen

    # struck at the first step of the second epoch, and of the third
    for heads, tails, ticks in (({1, 2, 3}, False, (4, 4)), (set(), True, (4, 4)), ({1}, True, (7,))):
        run, named = tmp_path / f"struck {heads}", partial(program, heads=heads, tails=tails)
        whole = start(named, tmp_path / f"whole {heads}")[1][0]
        assert not any(start(named, run, at)[0] for at in ticks)
        assert start(named, run)[1][0] == whole


class WithoutWeakReferences:
    __slots__ = ()

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


@pytest.mark.parametrize("kind", ["weighted", "slots", "set by a service"])
def test_a_resume_at_the_first_epochs_end_ends_with_the_digest_of_the_whole_run(kind, tmp_path: Path) -> None:
    def program(run: Path, tick: Tick) -> tuple[list[float], int | str | None]:
        seen, sampler = list[float](), WeightedRandomSampler([1.0] * 12, 12)

        class Sets(everstep.Service):
            default_schedule = Every(epochs=1)

            def run(self, boundary: everstep.Boundary) -> None:
                sampler.weights = (torch.arange(12) == sum(seen) % 12).double() + 0.01

        services = [Sets()] if kind == "set by a service" else []
        chosen: Any = WithoutWeakReferences() if kind == "slots" else sampler
        data = DataLoader(TensorDataset(SAMPLES), 4, sampler=chosen)
        with loop(run, Every(epochs=1), services, state={"seen": seen}, max_epoch=2) as train:
            for _ in train.iter_epochs():
                for _, (x,) in train.iter_steps(data):
                    seen.extend(x.flatten().tolist())
                    tick()
        return seen, "" if kind == "set by a service" else train.ending.digest

    assert not start(program, tmp_path / "struck", 4)[0]
    assert start(program, tmp_path / "struck")[1][0] == start(program, tmp_path / "whole")[1][0]


def test_what_the_program_now_freezes_stays_frozen(tmp_path: Path) -> None:
    for frozen in (False, True):
        net = Net()
        net.last.requires_grad_(not frozen)
        next(steps(tmp_path / "run", int, [0], state={"net": net}))
        assert [p.requires_grad for p in net.last.parameters()] == [not frozen] * 2


def test_parts_of_a_model_with_versioned_modules_can_be_chosen(tmp_path: Path) -> None:
    donor, heir = Net(), Net()
    for _ in steps(tmp_path / "donor", int, [0], state={"net": donor}):
        pass
    before, source = heir.last.weight.clone(), everstep.InitFrom(tmp_path / "donor", include="net/first")
    with loop(tmp_path / "heir", state={"net": heir}, init_from=source):
        assert torch.equal(heir.first.weight, donor.first.weight)
        assert torch.equal(heir.last.weight, before)
