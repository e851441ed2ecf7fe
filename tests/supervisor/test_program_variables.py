"""Variables of the program: what the loop changes in them and the state does not save is named.

A program here has no `assert`: pytest writes it with `locals()`, and such a function is not looked at.
"""

from __future__ import annotations

import math
import random
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everstep
from everstep.errors import Interrupted
from everstep.services import Console, Interrupt

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


def opened(run_dir: Path, state: dict[str, Any], lines: list[str]) -> everstep.TrainLoop:
    return everstep.TrainLoop(run_dir, state, seed=1, max_epoch=3, services=[Console(sink=lines.append)])


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
                if step == stop_at:
                    loop.call_soon(Interrupt("a pause"))
            losses.append(loss)
            if not keep:
                stopper.see(loss)
            if keep:
                slot.value = best = min(best, 5.0 - epoch)
            else:
                best = min(best, 5.0 - epoch)
        _lines.append(f"trained for {step_time:g} s")


def stopped(run_dir: Path, stop_at: int | None, keep: bool = False) -> list[str]:
    lines: list[str] = []
    if stop_at is None:
        train(run_dir, None, lines, keep)
        return lines
    with pytest.raises(Interrupted):
        train(run_dir, stop_at, lines, keep)
    return lines


def test_what_a_resume_has_not_is_named_with_its_values_and_nothing_is_called_verified(
    tmp_path: Path,
) -> None:
    first = stopped(tmp_path, 6)
    hints = [line for line in first if "your loop changes" in line]
    assert len(hints) == 2, first  # the running sum in the first epoch, the rest in the second
    again = stopped(tmp_path, None)
    (lost,) = [line for line in again if "is not as it was" in line]
    assert "best (inf, was 4.0)" in lost and "running (0.0, was " in lost
    assert "losses (another value)" in lost and "stopper.best (inf, was " in lost
    assert "rng (another value)" in lost and "average.shadow (another value)" in lost
    for name in ("loss (", "rate", "step_time", "batch", "epoch", "slot", "total"):
        assert name not in lost.partition(": this variable")[0].replace("losses (", "")
    (report,) = [line for line in again if line.startswith("resume ")]
    assert report.startswith("resume not verified") and "not in the state: " in report


def test_what_the_state_saves_is_not_named(tmp_path: Path) -> None:
    lines = [*stopped(tmp_path, 6, keep=True), *stopped(tmp_path, None, keep=True)]
    named = [line for line in lines if "this variable" in line]
    # `best` is a copy of the slot's value, which the program itself brings back after the resume
    assert all("best" in line and "average" not in line for line in named), named
    assert not any("is not as it was" in line for line in named), named


def test_a_loop_in_another_function_and_a_supervisor_are_looked_at_too(tmp_path: Path) -> None:
    def steps(sv: everstep.Supervisor, stop_at: int | None) -> float:
        best = math.inf
        data = sv.stream(BATCHES)
        while not sv.should_stop():
            best = min(best, 9.0 - next(data))
            if sv.step + 1 == stop_at:
                sv.call_soon(Interrupt("a pause"))
            sv.advance()
        return best

    lines: list[str] = []
    with pytest.raises(Interrupted):
        with everstep.Supervisor(tmp_path, max_step=9, services=[Console(sink=lines.append)]) as sv:
            steps(sv, 4)
    with everstep.Supervisor(tmp_path, max_step=9, services=[Console(sink=lines.append)]) as sv:
        steps(sv, None)
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


def test_what_each_epoch_sets_anew_is_no_loss_at_an_epochs_end(tmp_path: Path) -> None:
    """A running sum is lost inside an epoch, and not where the next one begins."""

    class Meter:
        def __init__(self) -> None:
            self.total = 0.0

        def reset(self) -> None:
            self.total = 0.0

    def train(_lines: list[str], stop_at: int | None, rate: float = 0.1) -> None:
        meter, running = Meter(), 0.0
        huge, system = 10**5000, random.SystemRandom()
        both = everstep.Checkpoints(everstep.Every(steps=2) | everstep.Every(epochs=1))
        services = [Console(sink=_lines.append), both]
        with everstep.TrainLoop(tmp_path, seed=1, max_epoch=3, services=services) as loop:
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

    lines: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        train(lines, 5)  # the checkpoint is that of the end of epoch 1
    lines.clear()
    with pytest.raises(KeyboardInterrupt):
        train(lines, 8)  # step 6, inside epoch 2
    assert not any("is not as it was" in line for line in lines), lines
    lines.clear()
    train(lines, None)
    (lost,) = [line for line in lines if "is not as it was" in line]
    assert "running (0.0, was 3.0)" in lost and "meter.total (0.0, was 3.0)" in lost


def test_a_look_leaves_what_the_program_got_from_locals(tmp_path: Path) -> None:
    """Before Python 3.13 a look at a function would change the dictionary that its `locals()` gave it."""

    def train(run_dir: Path, rate: float) -> dict[str, Any]:
        config = locals()
        with opened(run_dir, {}, []) as loop:
            for _ in loop.iter_epochs():
                for _ in loop.iter_steps(BATCHES):
                    pass
        return config

    assert train(tmp_path, 0.1) == {"run_dir": tmp_path, "rate": 0.1}


def test_a_number_of_the_size_of_seconds_is_no_time(tmp_path: Path) -> None:
    """Seconds on the processor are small numbers, like losses; only times of clocks are left out."""
    lines: list[str] = []

    def train(stop_at: int | None) -> None:
        best, began = 1e9, time.monotonic()
        with opened(tmp_path, {}, lines) as loop:
            for _ in loop.iter_epochs():
                for step, batch in loop.iter_steps(BATCHES):
                    best, began = min(best, time.process_time() * batch), max(began, time.monotonic())
                    if step == stop_at:
                        loop.call_soon(Interrupt("a pause"))

    with pytest.raises(Interrupted):
        train(6)
    train(None)
    (lost,) = [line for line in lines if "is not as it was" in line]
    assert "best (" in lost and "began" not in lost
