"""Variables and modules of the program: what the loop changes in them and the state does not save is named.

A program here has no `assert`: pytest writes it with `locals()`, and such a function is not looked at.
"""

from __future__ import annotations

import copy
import math
import random
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torchmetrics import MeanMetric, MetricCollection

import everstep
from everstep.backends.torch.given_values import is_same_mark, mark_of
from everstep.errors import Interrupted, UsageError
from everstep.services import Console, Interrupt
from everstep.supervisor.checks.program_variables import _is_set_in

BATCHES = [1.0, 2.0, 3.0, 4.0]


class Stopper:
    """An object of the program, as many scripts have one."""

    def __init__(self) -> None:
        self.best, self.patience = math.inf, 0

    def see(self, value: float) -> None:
        self.best, self.patience = min(self.best, value), self.patience + 1


class Average:
    def __init__(self) -> None:
        self.shadow = {"weight": np.zeros(2)}


def through(data: Iterator[Any]) -> Iterator[Any]:
    """A progress bar, say: its own variables are not the loop's."""
    yield from data


def pause(loop: Any, now: bool) -> None:
    if now:
        loop.call_soon(Interrupt("a pause"))


def opened(run_dir: Path, state: Any, lines: list[str], services: Any = ()) -> everstep.TrainLoop:
    listed = [Console(sink=lines.append), *services]
    return everstep.TrainLoop(run_dir, state, seed=1, max_epoch=3, services=listed)


def train(run_dir: Path, stop_at: int | None, _lines: list[str], keep: bool = False) -> None:
    """Train, with habits of many scripts; `keep`: the values are in the state."""
    total, slot, stopper, average = {"sum": 0.0}, everstep.Slot(math.inf), Stopper(), Average()
    best, losses, rng, loss, step_time = math.inf, [], random.Random(3), 0.0, 0.0
    state: dict[str, Any] = {"total": total}
    if keep:
        state |= {"slot": slot, "shadow": average.shadow, "losses": losses, "rng": rng}
    with ExitStack() as stack:
        loop = stack.enter_context(opened(run_dir, state, _lines))
        if keep:
            best = slot.value
        for epoch in loop.iter_epochs():
            running = 0.0
            rate = 0.1 / epoch  # set anew by the lines that a resume runs again
            for step, batch in through(loop.iter_steps(BATCHES)):
                step_time = 0.1 * step
                loss = rng.random() * rate * batch
                running += 0.0 if keep else loss
                average.shadow["weight"] += loss
                total["sum"] += loss
                loop.collect_metrics(loss=loss)
                pause(loop, step == stop_at)
            losses.append(loss)
            best = min(best, 5.0 - epoch)
            if keep:
                slot.value = best
            else:
                stopper.see(loss)
        _lines.append(f"trained for {step_time:g} s")


def cut(start: Callable[[list[str], int | None], object], stop_at: int) -> tuple[list[str], list[str]]:
    """The lines of a start that pauses there, and those of the start that goes on."""
    first: list[str] = []
    again: list[str] = []
    with pytest.raises(Interrupted):
        start(first, stop_at)
    start(again, None)
    return first, again


def lost_of(lines: list[str]) -> str:
    (line,) = [line for line in lines if "is not as it was" in line]
    return line


def hinted(lines: list[str]) -> list[str]:
    """The names of each hint."""
    return [line.partition(": your loop")[0] for line in lines if ": your loop changes" in line]


def test_what_a_resume_lacks_is_named_and_nothing_is_called_verified(tmp_path: Path) -> None:
    first, again = cut(lambda lines, stop_at: train(tmp_path, stop_at, lines), 6)
    assert len(hinted(first)) == 2, first  # the running sum in the first epoch, the rest in the second
    lost = lost_of(again)
    for each in ("best (inf, was 4.0)", "running (0.0, was ", "stopper.best (inf, was "):
        assert each in lost
    for name in ("losses", "rng", "average.shadow"):
        assert f"{name} (another value)" in lost
    for name in ("loss (", "rate", "step_time", "batch", "epoch", "slot", "total"):
        assert name not in lost.partition(": this variable")[0].replace("losses (", "")
    assert any("resume differs: step 7 loss was " in line for line in again), "it draws from the generator"
    assert not any("resume verified" in line for line in again)


def test_what_the_state_saves_is_not_named(tmp_path: Path) -> None:
    first, again = cut(lambda lines, stop_at: train(tmp_path, stop_at, lines, keep=True), 6)
    named = [line for line in (*first, *again) if "this variable" in line]
    # `best` is a copy of the slot's value, which the program itself brings back after the resume
    assert all("best" in line and "average" not in line for line in named), named
    assert not any("is not as it was" in line for line in named), named


def test_a_slot_and_a_ring_buffer_that_are_left_out_of_the_state_are_named(tmp_path: Path) -> None:
    def start(lines: list[str], stop_at: int | None) -> None:
        slot, ring = everstep.Slot(1.0), everstep.data.RingBuffer(8, {"x": "float64"})
        saved = everstep.Slot(0)
        with opened(tmp_path, {"extra": {"saved": saved}}, lines) as loop:
            for _epoch in loop.iter_epochs():
                for step, _batch in loop.iter_steps(BATCHES):
                    slot.value *= 0.5
                    saved.value += 1
                    ring.append(x=slot.value)
                    pause(loop, step == stop_at)

    first, again = cut(start, 6)
    assert hinted(first) == ["warning: ring.appended, slot.value"]
    for each in ("ring.appended (0, was 6)", "slot.value (1.0, was 0.015625)"):
        assert each in lost_of(again)


class ScheduledOptim:
    """Of a public Transformer: it counts the steps, and `zero_grad` resets nothing of its own."""

    def __init__(self) -> None:
        self.n_steps = 0

    def zero_grad(self) -> None:
        pass

    def step(self) -> None:
        self.n_steps += 1


@pytest.mark.parametrize(("stop_at", "lost"), [(10, "rate (0.5, was 0.125)"), (-8, "rate (1.0, was 0.25)")])
def test_what_heads_change_from_epoch_to_epoch_is_named(tmp_path: Path, stop_at: int, lost: str) -> None:
    def start(_lines: list[str], stop_at: int | None) -> None:
        rate, order, optimizer, pending = 1.0, [1, 2, 3, 4, 5], ScheduledOptim(), list[Any]()
        activation = math.ceil
        with opened(tmp_path, {}, _lines) as loop:
            for epoch in loop.iter_epochs():
                rate *= 0.5
                random.shuffle(order)
                activation = math.floor if epoch == 2 else activation
                for step, batch in loop.iter_steps(BATCHES):
                    optimizer.zero_grad()
                    optimizer.step()
                    loop.collect_metrics(loss=activation(rate * batch))
                    pause(loop, step == stop_at)
                pending.append(object())
                pause(loop, -loop.step == stop_at)

    first, again = cut(start, stop_at)
    assert hinted(first) == ["warning: optimizer.n_steps", "warning: rate"], first
    named = lost_of(again)
    others = [f"{name} (another value)" for name in ("order", "activation", "pending")]
    assert all(each in named for each in (lost, *others, "optimizer.n_steps (0, was"))


class Asked(dict[str, int]):
    """Counts the calls of its methods, as a cache may: a look calls none."""

    calls = 0

    def __getitem__(self, name: str) -> int:
        Asked.calls += 1
        return super().__getitem__(name)

    keys: Any = __getitem__
    items = values = __iter__ = __len__ = keys


class Runner:
    """What a head sets by attributes, a function and a loop of its own, the next head sets again."""

    def __init__(self, run_dir: Path, lines: list[str]) -> None:
        self.epoch, self.rate, self.log, self.asked = 0, 0.1, None, Asked(a=1)
        self.config, self._loop = {"epoch": 0}, opened(run_dir, {}, lines)

    def train_epoch(self, loop: Any, epoch: int, stop_at: int | None) -> None:
        slow = 1 / epoch
        for step, batch in loop.iter_steps(BATCHES):
            loop.collect_metrics(loss=batch * slow * epoch * self.rate * self.epoch)
            pause(loop, step == stop_at)

    def train(self, stop_at: int | None) -> None:
        share = 0.0
        with self._loop as loop:
            for epoch in loop.iter_epochs():
                share, self.rate = 1 - epoch / 10, 0.1 / epoch
                self.epoch, self.config["epoch"] = epoch, epoch
                self.log = self.log or print  # made when it is used
                for _ in ("generator",):
                    self.train_epoch(loop, epoch, stop_at if share else None)
                pause(loop, -loop.step == stop_at)


@pytest.mark.parametrize("stop_at", [10, -4])
def test_what_each_head_sets_is_not_named(tmp_path: Path, stop_at: int) -> None:
    first, again = cut(lambda lines, stop_at: Runner(tmp_path, lines).train(stop_at), stop_at)
    assert not [line for line in (*first, *again) if "this variable" in line]
    assert not Asked.calls


def test_an_object_of_the_state_whose_name_gets_another_one_is_named(tmp_path: Path) -> None:
    def start(_lines: list[str], stop_at: int | None) -> None:
        baseline, recent, tail, kept, mine = np.zeros(()), [0.0], [0], np.zeros(2), Stopper()
        warm, after = {"lr": 1}, {"lr": 2}
        schedule = warm
        state = {"b": baseline, "r": recent, "t": tail, "k": kept, "m": vars(mine)}
        state |= {"warm": warm, "after": after}
        with opened(tmp_path, state, _lines) as loop:
            for epoch in loop.iter_epochs():
                for step, batch in loop.iter_steps(BATCHES):
                    baseline = 0.9 * baseline + batch
                    recent = [*recent[-2:], float(baseline)]
                    kept += 1
                    mine.see(batch)
                    pause(loop, step == stop_at)
                tail, schedule = [epoch, *tail], after if schedule is warm else schedule

    first, again = cut(start, 6)
    hints = [
        line.partition(": this")[0] for line in first if "your loop gave the name to another one" in line
    ]
    assert hints == ["warning: baseline, recent", "warning: schedule, tail"], first
    names = ", ".join(f"{name} (another value)" for name in ("baseline", "recent", "tail", "schedule"))
    assert lost_of(again).startswith(f"warning: {names}: ")
    assert not any(name in line for line in (*first, *again) for name in ("kept", "mine", "calls"))


def test_a_loop_in_another_function_and_a_supervisor_are_looked_at_too(tmp_path: Path) -> None:
    def steps(sv: everstep.Supervisor, stop_at: int | None) -> float:
        best = math.inf
        data = sv.stream(BATCHES)
        while not sv.should_stop():
            best = min(best, 9.0 - next(data))
            pause(sv, sv.step + 1 == stop_at)
            sv.advance()
        return best

    def start(lines: list[str], stop_at: int | None) -> None:
        with everstep.Supervisor(tmp_path, max_step=9, services=[Console(sink=lines.append)]) as sv:
            steps(sv, stop_at)

    lines = cut(start, 4)[1]
    assert any("best (inf, was 5.0): this variable" in line for line in lines), lines


def test_a_look_keeps_no_variable_alive(tmp_path: Path) -> None:
    alive = []

    def loop_over() -> None:
        big = Stopper()
        reference = weakref.ref(big)
        with opened(tmp_path, {}, []) as loop:
            for _ in loop.iter_epochs():
                for _ in loop.iter_steps(BATCHES):
                    pass
                if loop.epoch == 2:
                    del big
                    alive.append(reference() is not None)
                    big = Stopper()

    loop_over()
    assert alive == [False]


class Meter:
    def __init__(self) -> None:
        self.total = 0.0

    reset = __init__


def test_what_each_epoch_sets_anew_is_no_loss_at_an_epochs_end(tmp_path: Path) -> None:
    """A running sum is lost inside an epoch, and not where the next one begins."""

    def train(_lines: list[str], stop_at: int | None, rate: float = 0.1) -> None:
        meter, running = Meter(), 0.0
        huge, system = 10**5000, random.SystemRandom()
        both = everstep.Checkpoints(everstep.Every(steps=2) | everstep.Every(epochs=1))
        with opened(tmp_path, {}, _lines, [both]) as loop:
            for _ in loop.iter_epochs():
                running: float = 0.0  # type: ignore[no-redef]
                meter.reset()
                for step, batch in loop.iter_steps(BATCHES):
                    running += batch
                    meter.total += batch
                    if step == stop_at:
                        raise KeyboardInterrupt
                if running != meter.total:
                    raise AssertionError(rate, huge, system)

    said: list[list[str]] = [[], [], []]
    for lines, stop_at in zip(said, (5, 8), strict=False):  # saved last at the end of epoch 1, and at step 6
        with pytest.raises(KeyboardInterrupt):
            train(lines, stop_at)
    assert not any("is not as it was" in line for line in said[1]), said
    train(said[2], None)
    lost = lost_of(said[2])
    assert "running (0.0, was 3.0)" in lost and "meter.total (0.0, was 3.0)" in lost


def test_a_look_leaves_what_the_program_got_from_locals(tmp_path: Path) -> None:
    """Before Python 3.13 a look at a function would change the dictionary that its `locals()` gave it."""

    def train(run_dir: Path, rate: float) -> dict[str, Any]:
        config = vars()  # as locals() is
        with opened(run_dir, {}, []) as loop:
            for _ in loop.iter_epochs():
                for _ in loop.iter_steps(BATCHES):
                    pass
        return config

    assert train(tmp_path, 0.1) == {"run_dir": tmp_path, "rate": 0.1}


global_step, best, shown = 0, math.inf, 0.0
"""Changed by `global`: as a training script of one module does."""


def train_epoch(loop: everstep.TrainLoop, stop_at: int | None) -> None:
    global global_step, shown
    for step, batch in loop.iter_steps(BATCHES):
        shown = batch / 2
        global_step += 1
        loop.collect_metrics(loss=shown)
        pause(loop, step == stop_at)


def main(run_dir: Path, stop_at: int | None, _lines: list[str]) -> None:
    """Train; a negative number stops at the end of the epoch with this step."""
    global best
    with opened(run_dir, {}, _lines) as loop:
        for epoch in loop.iter_epochs():
            train_epoch(loop, stop_at)
            best = min(best, 5.0 - epoch)
            pause(loop, -loop.step == stop_at)


def begin_process() -> None:
    global global_step, best, shown
    global_step, best, shown = 0, math.inf, 0.0


@pytest.mark.parametrize(("stop_at", "steps", "was"), [(6, 6, 4.0), (-8, 8, 3.0)])
def test_a_global_that_functions_change_is_named(tmp_path: Path, stop_at: int, steps: int, was) -> None:
    """Of a public mean teacher: a stop inside an epoch, and at its end, where only `main` is on the stack."""
    first, again = cut(lambda lines, at: (begin_process(), main(tmp_path, at, lines)), stop_at)
    hints = " ".join(hinted(first))
    assert "global_step" in hints and "best" in hints and "shown" not in hints
    lost = lost_of(again)
    assert f"global_step (0, was {steps})" in lost and f"best (inf, was {was})" in lost
    assert "shown" not in lost


class CachedLoader:
    """Data of a public CIFAR trainer: what its first pass has drawn, it flips in every other one."""

    def __init__(self) -> None:
        self.epoch, self.cached, self.number = 0, np.zeros(4), 0
        self.rng = random.Random(5)

    def __iter__(self) -> Iterator[Any]:
        self.number = 0
        if self.epoch == 0:
            self.cached = np.random.random(4)
        images = self.cached[::-1] if self.epoch % 2 else self.cached
        self.epoch += 1
        for each in images:
            self.number += 1
            yield each + self.rng.random()


class StatefulLoader(CachedLoader):
    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "cached": self.cached, "rng": self.rng.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.cached = state["epoch"], state["cached"]
        self.rng.setstate(state["rng"])


@pytest.mark.parametrize("kind", [CachedLoader, StatefulLoader])
def test_what_data_keeps_from_pass_to_pass_is_named_at_an_epochs_end(tmp_path: Path, kind) -> None:
    def train(_lines: list[str], stop_at: int | None, run: str = "run") -> float:
        total, loader = everstep.Slot(0.0), kind()
        with opened(tmp_path / run, {"total": total}, _lines) as loop:
            for _ in loop.iter_epochs():
                for _, batch in loop.iter_steps(loader):
                    total.value += float(batch)
                pause(loop, loop.step == stop_at)
        return float(total.value)

    lines: list[str] = []
    again: list[str] = []
    undisturbed = train([], None, "whole")
    with pytest.raises(Interrupted):
        train(lines, 4)
    resumed = train(again, None)
    lines = [line for line in lines if "your loop changes" in line]
    lost = [line for line in again if "is not as it was" in line]
    if kind is StatefulLoader:
        assert resumed == undisturbed and not lost and not lines
        return
    (hint,), (line,) = lines, lost
    assert "loader.epoch" in hint and "state_dict() of your data" in hint and "number" not in hint
    assert "loader.epoch (0, was 1)" in line and "loader.cached (another value)" in line
    assert "loader.rng (another value)" in line and "state_dict() of your data" in line
    assert "number" not in line
    assert any(line.startswith("resume not verified") for line in again)


def test_what_an_entry_of_ones_own_class_holds_is_not_warned_about_and_yet_compared(tmp_path: Path) -> None:
    """As the recipe for environments saves them: `Environments(envs)` names a part of what they keep."""

    class Saved:
        def __init__(self, stopper: Stopper) -> None:
            self.stopper = stopper

        def state_dict(self) -> dict[str, Any]:
            return {"best": self.stopper.best}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.stopper.best = state["best"]

    class Trainer:
        def __init__(self) -> None:
            self.inner = Stopper()

    def train(_lines: list[str], stop_at: int | None) -> None:
        stopper, trainer = Stopper(), Trainer()
        with opened(tmp_path, {"one": Saved(stopper), "two": Saved(trainer.inner)}, _lines) as loop:
            for _ in loop.iter_epochs():
                for step, batch in loop.iter_steps(BATCHES):
                    stopper.see(batch)
                    trainer.inner.see(batch)
                    pause(loop, step == stop_at)

    first, again = cut(train, 6)
    assert not any("your loop changes" in line for line in first), first
    lost = lost_of(again)
    assert "stopper.patience (0, was 6), trainer.inner.patience (0, was 6)" in lost and "best" not in lost


def test_what_is_set_in_some_cases_is_named_only_where_something_may_read_it_before(tmp_path: Path) -> None:
    """As in nanoGPT: `kept["best"] = best = loss` under an `if`, and a checkpoint made and written there."""

    def train(_lines: list[str], stop_at: int | None) -> None:
        kept = {"best": math.inf}
        best = shown = part = fallback = 0.0  # set before each read
        lowest = later = tail = told = tried = broken = other = hook = 0.0
        checkpoint: dict[str, float] = {}

        def tell() -> float:
            return told

        def show() -> float:
            return shown

        hooks = [lambda: hook]
        with opened(tmp_path, {"kept": kept}, _lines) as loop:
            for _ in loop.iter_epochs():
                for step, batch in loop.iter_steps(BATCHES):
                    loss = 9.0 - step
                    pause(loop, step == stop_at)
                    loop.collect_metrics(most=max(best for best in (loss, 0.0)))
                    if loss < kept["best"]:
                        kept["best"] = best = loss
                        checkpoint = {"best": best}
                        loop.collect_metrics(best=checkpoint["best"])
                        shown = loss
                        loop.collect_metrics(shown=show())
                        for number in range(2):
                            if number:
                                part = loss
                                loop.collect_metrics(part=part)
                            else:
                                continue
                        hook = told = loss
                    if loss < lowest or not lowest:
                        lowest = loss
                    loop.collect_metrics(told=tell())
                    try:
                        tried = step + math.sqrt(3.0 - batch)
                        fallback = loss
                    except ValueError:
                        fallback = loss
                    loop.collect_metrics(tried=tried, fallback=fallback)
                    for number in range(2):
                        if batch > 3:
                            break
                        broken = loss + number
                    loop.collect_metrics(broken=broken)
                    if batch > 2:
                        later = tail = loss
                        continue
                    elif batch > 1:
                        loop.collect_metrics(other=other)
                    other = loss
                loop.collect_metrics(tail=tail)
        _lines.append(f"{later} {hooks}")

    first, again = cut(train, 7)
    named = "lowest, later, tail, told, tried, broken, other, hook"
    assert hinted(first) == [f"warning: {', '.join(sorted(named.split(', ')))}"], first
    assert all(f"{name} (" in lost_of(again) for name in named.split(", "))
    assert not any(f"{name} (" in lost_of(again) for name in ("best", "checkpoint", "shown", "part"))


def test_numbers_of_numpy_generators_of_torch_iterators_and_small_times_are_compared(tmp_path: Path) -> None:
    """Seconds on the processor are small numbers, like losses; only times of clocks are left out."""

    def train(_lines: list[str], stop_at: int | None) -> None:
        highest, noise, same = np.float32(0.0), torch.Generator().manual_seed(1), 2.0
        fastest, began = 1e9, time.monotonic()
        more = iter(torch.utils.data.DataLoader(torch.arange(100.0)))  # type: ignore[arg-type]
        with opened(tmp_path, {}, _lines) as loop:
            for _ in loop.iter_epochs():
                for step, batch in loop.iter_steps(BATCHES):
                    highest = np.float32(max(highest, batch))
                    same = np.float32(2.0) if same else same
                    fastest, began = min(fastest, time.process_time() * batch), max(began, time.monotonic())
                    loop.collect_metrics(noise=torch.rand((), generator=noise), more=next(more))
                    pause(loop, step == stop_at)

    first, again = cut(train, 6)
    assert any("highest" in names for names in hinted(first)), first
    lost = lost_of(again)
    for each in ("highest (0.0, was 4.0)", "noise (another value)", "more (another value)", "fastest ("):
        assert each in lost
    assert "same" not in lost and "began" not in lost


class Drawing:
    def __init__(self) -> None:
        self.noise = random.Random(3)

    def __iter__(self) -> Iterator[float]:
        return iter([self.noise.random() for _ in range(4)])


class Loaders:
    """Data of one's own that reads one loader, or two together."""

    def __init__(self, count: int) -> None:
        generators = [torch.Generator().manual_seed(seed) for seed in range(count)]
        samples: Any = torch.arange(4)
        self.loaders = [torch.utils.data.DataLoader(samples, shuffle=True, generator=g) for g in generators]
        if count == 1:
            (self.loaders,) = self.loaders  # type: ignore[assignment]

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        return zip(*self.loaders, strict=True) if isinstance(self.loaders, list) else iter(self.loaders)


HOLDING: dict[str, Callable[[], Any]] = {
    **{f"noise {wrap.__name__}": partial(lambda wrap: wrap(Drawing()), wrap)
       for wrap in (everstep.data.prefetch, everstep.data.replay, everstep.data.checked)},
    **{f"loaders {count}": partial(Loaders, count) for count in (1, 2)},
}  # fmt: skip
"""Attribute in which data, perhaps wrapped, holds generators -> the data."""


@pytest.mark.parametrize("kind", HOLDING)
def test_generators_of_steps_and_in_data_are_compared_at_an_epochs_end(tmp_path: Path, kind: str) -> None:
    def train(_lines: list[str], stop_at: int | None) -> None:
        noise, data = torch.Generator().manual_seed(1), HOLDING[kind]()
        with opened(tmp_path, {}, _lines) as loop:
            for _ in loop.iter_epochs():
                for _ in loop.iter_steps(data):
                    loop.collect_metrics(noise=torch.rand((), generator=noise))
                pause(loop, loop.step == stop_at)

    again = cut(train, 8)[1]
    for said in (f"data.{kind.split()[0]} (another value): this variable", "noise: this generator"):
        assert any(said in line for line in again), again


def test_what_a_loader_brings_back_is_not_named(tmp_path: Path) -> None:
    """A sampler of one's own, and the generator of a loader that is read after the resume point."""

    class InPlace:
        def __init__(self) -> None:
            self.batches, self.passes = [[0, 1], [2, 3]], 0

        def __iter__(self) -> Iterator[list[int]]:
            self.passes += 1
            for batch in self.batches:
                random.shuffle(batch)
                yield batch

        def __len__(self) -> int:
            return 2

    def train(_lines: list[str], stop_at: int | None) -> None:
        noise, sampler, dataset = torch.Generator().manual_seed(4), InPlace(), torch.arange(4.0)
        first = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)  # type: ignore[arg-type]
        second = torch.utils.data.DataLoader(dataset, batch_size=2, shuffle=True, generator=noise)  # type: ignore[arg-type]
        with opened(tmp_path, {}, _lines) as loop:
            for _ in loop.iter_epochs():
                for step, batch in loop.iter_steps(first):
                    loop.collect_metrics(loss=batch.sum())
                    pause(loop, step == stop_at)
                for _, batch in loop.iter_steps(second, name="second"):
                    loop.collect_metrics(loss=batch.sum())
                pause(loop, -loop.step == (stop_at or 0))

    lines: list[str] = []
    for stop_at in (5, -8):
        with pytest.raises(Interrupted):
            train(lines, stop_at)
    train(lines, None)
    assert not any("this variable" in line for line in lines), lines


def test_another_stream_than_the_checkpoints_names_the_variable_that_chose_it(tmp_path: Path) -> None:
    """Tasks one after another, as in continual learning: `task` begins anew, and so does its data."""

    def train(_lines: list[str], stop_at: int | None) -> None:
        task = 0
        with opened(tmp_path, {}, _lines) as loop:
            for _ in loop.iter_epochs():
                for step, _ in loop.iter_steps(BATCHES, name=f"task{task}"):
                    pause(loop, step == stop_at)
                task += 1

    with pytest.raises(UsageError, match=r"stream 'task1', this one reads 'task0'; task \(0, was 1\)"):
        cut(train, 6)


def scaled(scaler: torch.amp.GradScaler) -> None:
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()


KINDS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any, nn.Module, int], Any]]] = {
    "MeanMetric": (lambda model: MeanMetric(), lambda made, model, step: made.update(step)),
    "MetricCollection": (lambda model: MetricCollection({"a": MeanMetric(), "b": MeanMetric()}),
                         lambda made, model, step: made.update(step)),
    "AveragedModel": (AveragedModel,
                      lambda made, model, step: made.update_parameters(model) if step % 4 == 0 else None),
    "GradScaler": (lambda model: torch.amp.GradScaler("cpu", growth_interval=2),
                   lambda made, model, step: scaled(made)),
}  # fmt: skip


def warnings(
    run_dir: Path, state: dict[str, Any], step_of: Callable[[int], Any], tail: Any = id
) -> list[str]:
    """What a run says of modules outside its state; `step_of` is part of each step, `tail` of each tail."""
    model, data = state["model"], everstep.data.arrays(torch.ones(8, 2), batch_size=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with everstep.TrainLoop(run_dir, {**state, "optimizer": optimizer}, max_epoch=3) as loop:
        for _ in loop.iter_epochs():
            for step, (x,) in loop.iter_steps(data):
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                step_of(step)
            tail(loop)
    return [text for text in loop.ending.warnings if "the state does not save it" in text]


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_that_steps_change_is_named_once_unless_it_is_saved(kind: str, tmp_path: Path) -> None:
    make, change = KINDS[kind]
    model = nn.Linear(2, 1)
    made = make(model)
    step: Callable[[int], Any] = lambda step: change(made, model, step)  # noqa: E731
    (said,) = warnings(tmp_path / "lacks it", {"model": model}, step)
    assert said.startswith(f"{kind}: ")
    assert warnings(tmp_path / "saves it", {"model": model, "made": {"all": [made]}}, step) == []


def test_what_evaluations_and_tails_change_is_not_named(tmp_path: Path) -> None:
    model, inside, after = nn.Linear(2, 1), MeanMetric(), MeanMetric()

    def tail(loop: Any) -> None:
        after.update(1.0)
        with loop.evaluation():
            inside.update(1.0)

    frozen = nn.BatchNorm1d(2).eval()
    assert warnings(tmp_path / "run", {"model": model}, lambda step: frozen(torch.ones(2, 2)), tail) == []


def test_what_is_collected_while_it_is_compared_has_not_changed() -> None:
    """Models of earlier runs in a notebook, say, which the collector of garbage finds just then."""
    weight = torch.ones(1)
    first, second = mark_of(weight), mark_of(weight)
    weight.add_(1)
    third = mark_of(weight)
    assert is_same_mark(first, second) and not is_same_mark(second, third)
    del weight
    assert is_same_mark(first, second) and not is_same_mark(second, third)


class Pole:
    """As an environment of gymnasium: no state dict, and each step reads what the steps before have left."""

    angle = 0.0


class Agent(nn.Linear):
    def __init__(self, pole: Pole) -> None:
        super().__init__(2, 1)
        self.pole = pole


class SavedPole:
    def __init__(self, pole: Pole) -> None:
        self.pole = pole

    def state_dict(self) -> dict[str, float]:
        return {"angle": self.pole.angle}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.pole.angle = state["angle"]


def test_an_environment_that_the_network_holds_is_named_with_a_remedy(tmp_path: Path) -> None:
    pole = Pole()
    agent = Agent(pole)

    def fall(step: int) -> None:
        pole.angle += 0.1 * step

    (said,) = warnings(tmp_path / "forgot", {"model": agent}, fall)
    assert said.startswith("model.pole.angle: ") and "later steps or the epoch's tail may read it" in said
    assert "or add what changes inside it" in said, "the object itself cannot be added"
    assert warnings(tmp_path / "saved", {"model": agent, "pole": SavedPole(pole)}, fall) == []


class Notes(nn.Linear):
    """Lists its own parameters, as DistributedDataParallel does, and keeps what no checkpoint can hold."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.groups = {"decay": [self.weight], "none": [self.bias]}
        self.by_size, self.poles = dict[tuple[int, int], Pole](), [Pole(), Pole()]


def test_a_number_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    def count(step: int) -> None:
        model.spent += Decimal("0.1")

    model = type("Spending", (nn.Linear,), {"spent": Decimal(0)})(2, 1)
    model.spent = Decimal(1)
    (said,) = warnings(tmp_path, {"model": model}, count)
    assert said.startswith("model.spent: the loop changes it")


def test_containers_that_change_their_length_and_cannot_be_saved_are_named(tmp_path: Path) -> None:
    def grow(step: int) -> None:
        model.poles.append(model.by_size.setdefault((step, step), Pole()))

    model = Notes()
    assert warnings(tmp_path / "turned", {"model": model}, lambda step: model.poles.reverse()) == []
    (said,) = warnings(tmp_path / "grown", {"model": model}, grow)
    assert said.startswith("model.by_size, model.poles: the loop changes it")


class Broken(nn.Module):
    def modules(self) -> Any:
        raise RuntimeError("of its own")


def test_a_module_that_fails_when_looked_at_stops_no_run(tmp_path: Path, capsys) -> None:
    broken = Broken()
    assert warnings(tmp_path / "run", {"model": nn.Linear(2, 1)}, lambda step: None) == []
    assert capsys.readouterr().out.count("were not checked (RuntimeError: of its own)") == 1
    assert isinstance(broken, nn.Module)


def test_entries_that_come_to_share_an_array_are_named(tmp_path: Path, capsys) -> None:
    """An optimizer begun with another's state, weights kept as the best: a resume gives one array to each."""

    def train(max_step: int, copied: bool, run_dir: str) -> list[str]:
        model = nn.Linear(2, 1)
        first, second = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in range(2))
        best = everstep.Slot(None)
        state = {"model": model, "tied": model.weight, "first": first, "second": second, "best": best}
        with everstep.Supervisor(tmp_path / run_dir, state, seed=1, max_step=max_step) as sv:
            while not sv.should_stop():
                first.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                first.step()
                if sv.step == 1:
                    handed = [first.state_dict(), model.state_dict()]
                    handed = copy.deepcopy(handed) if copied else handed
                    second.load_state_dict(handed[0])
                    best.value = handed[1]
                sv.advance()
        said = "".join(capsys.readouterr())
        return [line for line in said.splitlines() if "have come to share" in line]

    assert not train(3, True, "copied") + train(6, True, "copied")
    model_and_best, optimizers = sorted(train(3, False, "shared"), key=len)
    assert "'first' and 'second'" in optimizers and "momentum_buffer" in optimizers
    assert "'model' and 'best'" in model_and_best and "best/value/weight" in model_and_best
    assert not train(6, False, "shared"), "restored, each has its own"


@pytest.mark.parametrize(("name", "body", "is_set_first"), [
    ("v", "v = s; print(v)", True),
    ("v", "print([(v, [v for v in 'ab']) for k in 'a']); v = s", False),
    ("v", "print((lambda k: v + sum(v for v in k))([s])); v = s", False),
    ("v", "print([v for v in 'ab']); v = s", True),
    ("o.n", "o.n = s; print(o.n)", True),
    ("o.n", "print(o.mean); o.n = s", False),  # a property may read it
    ("v", "if s > 1: continue\n        v = s", True),
    ("v", "if s > 1: continue\n        v = s\n    print(v)", False),
])  # fmt: skip
def test_a_round_sets_a_variable_before_it_reads_it(tmp_path: Path, name: str, body, is_set_first) -> None:
    source = f"def main():\n    for s in range(4):\n        {body.replace('; ', chr(10) + ' ' * 8)}\n"
    (tmp_path / "script.py").write_text(source)
    assert _is_set_in(((str(tmp_path / "script.py"), 3),), name, True) == is_set_first
