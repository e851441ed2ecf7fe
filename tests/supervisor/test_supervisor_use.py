"""A loop of one's own under a Supervisor: its few calls, their order, streams, threads, and the end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep import Every, Supervisor
from everstep.data import arrays
from everstep.data.cursor import CursorWrapper, StreamWrapper
from everstep.errors import DataError, UsageError
from everstep.supervisor.threads.signals import SignalWatch
from everstep.testing import nothing_left
from tiny_runs import Boom, boom_at, events, quiet, rows, supervised
from waiting import PATIENCE

Hook = Callable[[Supervisor, int], object]


class Walk:
    """A Supervisor program with a stream, noise and momentum; call `run` once."""

    def __init__(self, run_dir: Path, *, passes: int | None = None, **arguments: Any) -> None:
        self.run_dir, self.passes = run_dir, passes
        self.w, self.momentum = np.zeros(3), np.zeros(3)
        self.data = everstep.data.arrays(np.arange(10), batch_size=2, shuffle=True)
        self.seen: list[tuple[int, ...]] = []
        self.lines: list[str] = []
        arguments = {"seed": 3, "state": {"w": self.w, "momentum": self.momentum}, **arguments}
        services = [*arguments.pop("services", ()), everstep.services.Console(sink=self.lines.append)]
        self.sv = Supervisor(run_dir, services=services, **arguments)

    def run(self, inside: Hook = lambda sv, step: None, leave: int = 0) -> Walk:
        """`inside` is called in each step before its end; the loop is left by `break` after step `leave`."""
        with self.sv as sv:
            batches = sv.stream(self.data, passes=self.passes)
            while not sv.should_stop():
                (ids,) = next(batches)
                gradient = self.w - ids.mean() + np.random.standard_normal(3)
                self.momentum[:] = 0.9 * self.momentum + gradient
                self.w -= 0.1 * self.momentum
                inside(sv, sv.step + 1)
                sv.advance(loss=float(gradient @ gradient))
                self.seen.append(tuple(int(i) for i in ids))
                if sv.step == leave:
                    break
        return self

    def result(self) -> Any:
        return self.w.tobytes(), self.sv.ending.digest, rows(self.run_dir)


# ------------------------------------------------------------------------------------------- the loop


def test_a_loop_of_ones_own_stops_at_the_exact_step_and_saves_the_last(tmp_path: Path) -> None:
    walk = Walk(tmp_path / "run", max_step=12).run()
    ending = walk.sv.ending
    assert (ending.step, ending.finished, ending.reason) == (12, True, "max_step 12 is reached")
    assert (tmp_path / "run" / "checkpoints" / "step-00000012").is_dir()
    assert [r[1] for r in rows(tmp_path / "run", "step")] == list(range(1, 13))
    again = Walk(tmp_path / "run", max_step=12).run()
    assert again.seen == [] and again.w.tobytes() == walk.w.tobytes()


# ------------------------------------------------------------------------------------- order of use


def test_a_step_after_the_stop_is_refused(tmp_path: Path) -> None:
    sv = quiet(tmp_path / "run", max_step=3)

    def never_asks() -> None:
        with sv:
            sv.should_stop()
            for _ in range(10):
                sv.advance()

    with pytest.raises(UsageError, match=r"max_step 3 is reached.*while not sv.should_stop\(\)"):
        never_asks()
    assert sv.ending.step == 3
    with quiet(tmp_path / "run", max_step=3) as again:
        assert again.should_stop()
        with pytest.raises(UsageError, match="max_step 3 is reached"):
            again.advance()


def test_a_loop_without_a_stream_is_warned_once_unless_it_says_so(tmp_path: Path) -> None:
    for silent in (False, True):
        sv = quiet(tmp_path / str(silent), max_step=3)
        if silent:
            supervised(sv)
        else:
            with sv:
                while not sv.should_stop():
                    sv.advance()
        said = [text for text in sv.ending.warnings if "no stream is registered" in text]
        assert sv.ending.step == 3 and len(sv.ending.warnings) == len(said) == (not silent)
        assert silent or ("sv.stream(data)" in said[0] and "sv.stream(None)" in said[0])


def test_steps_without_batches_and_values_are_compared_by_their_updates(tmp_path: Path) -> None:
    def start(crash: int = 0, rate: float = 0.1) -> int | None:
        model = torch.nn.Linear(2, 2)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        services = [everstep.Checkpoints(Every(steps=4))]
        state = {"model": model, "optimizer": optimizer}

        def step(sv: Supervisor) -> None:
            boom_at(crash)(sv, sv.step + 1)
            (rate * model(torch.ones(1, 2))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        sv = supervised(Supervisor(tmp_path, state, max_step=9, services=services), step)
        return sv.ending.diverged  # type: ignore[no-any-return]

    with pytest.raises(Boom):
        start(8)
    with pytest.raises(Boom):
        start(8)
    assert [each["report"] for each in events(tmp_path, "verified")] == [
        "resume verified: 3 steps executed again: 3 state digests equal"
    ]
    assert start(rate=0.2) == 5


def test_a_loop_left_by_break_saves_its_last_step(tmp_path: Path) -> None:
    def start(name: str, leave: int = 0) -> Walk:
        never = [everstep.Checkpoints(everstep.Never())]
        return Walk(tmp_path / name, max_step=9, services=never).run(leave=leave)

    straight = start("straight")
    assert not start("run", leave=5).sv.ending.finished
    again = start("run")
    assert again.sv.ending.resumed_from == "step-00000005"
    assert again.result() == straight.result()


def test_a_batch_without_its_advance_is_not_part_of_the_last_save(tmp_path: Path) -> None:
    walk = Walk(tmp_path / "run", max_step=9)
    with walk.sv as sv:
        batches = sv.stream(walk.data)
        for _ in range(3):
            sv.should_stop()
            next(batches)
            sv.advance()
        next(batches)
    assert any("its step not completed by advance()" in w for w in walk.sv.ending.warnings)


# ------------------------------------------------------------------------------------------- streams


def test_passes_end_the_loop_cleanly(tmp_path: Path) -> None:
    walk = Walk(tmp_path / "run", passes=2).run()
    ending = walk.sv.ending
    assert (ending.step, ending.finished, ending.reason) == (10, True, "stream 'train' ended after 2 passes")
    assert sorted(i for ids in walk.seen[:5] for i in ids) == list(range(10))
    assert sorted(i for ids in walk.seen[5:] for i in ids) == list(range(10))
    assert walk.seen[:5] != walk.seen[5:]
    again = Walk(tmp_path / "run", passes=2).run()
    assert again.seen == [] and again.sv.ending.finished


def test_more_passes_continue_a_run_that_used_its_up(tmp_path: Path) -> None:
    straight = Walk(tmp_path / "straight", passes=3).run()
    Walk(tmp_path / "run", passes=2).run()
    walk = Walk(tmp_path / "run", passes=3).run()
    assert walk.seen == straight.seen[10:]
    assert walk.result() == straight.result()


def test_a_stream_that_the_program_forgot_on_resume(tmp_path: Path) -> None:
    Walk(tmp_path / "run", max_step=3).run()
    with quiet(tmp_path / "run", max_step=5, seed=3, state={"w": np.zeros(3), "momentum": np.zeros(3)}) as sv:
        sv.stream(everstep.data.arrays(np.arange(10), batch_size=2, shuffle=True), "training")
        with pytest.raises(UsageError, match=r"stream 'train'.*did you mean 'training'"):
            sv.should_stop()


# ------------------------------------------------------------------------------------------ threads


def test_a_periodic_function_runs_at_once_and_again_until_the_end(tmp_path: Path) -> None:
    calls: list[str] = []
    twice = threading.Event()

    def beat() -> None:
        calls.append(threading.current_thread().name)
        if len(calls) >= 2:
            twice.set()

    with nothing_left():
        walk = Walk(tmp_path / "run", max_step=2)
        with walk.sv as sv:
            sv.loop(0.001, beat)
            assert twice.wait(PATIENCE)
    assert all("beat" in name for name in calls)


def test_a_failing_periodic_function_ends_the_training_with_its_own_traceback(tmp_path: Path) -> None:
    failed = threading.Event()

    def breaks_here() -> None:
        failed.set()
        raise Boom("in the background")

    walk = Walk(tmp_path / "run", max_step=100_000)

    def inside(sv: Supervisor, step: int) -> None:
        if step == 3:
            sv.loop(60, breaks_here)
            assert failed.wait(PATIENCE)

    with nothing_left(), pytest.raises(Boom, match="in the background") as raised:
        walk.run(inside)
    assert "breaks_here" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert not walk.sv.ending.finished and 3 <= walk.sv.ending.step < 100_000


def test_an_error_in_a_thread_of_ones_own(tmp_path: Path) -> None:
    walk = Walk(tmp_path / "run", max_step=100_000)

    def work(sv: Supervisor) -> None:
        with sv.stop_on_exception():
            raise Boom("elsewhere")

    def inside(sv: Supervisor, step: int) -> None:
        if step == 2:
            thread = threading.Thread(target=work, args=(sv,))
            thread.start()
            thread.join()

    with pytest.raises(Boom, match="elsewhere"):
        walk.run(inside)
    assert walk.sv.ending.step == 2


# ------------------------------------------------------------------------- signals and other threads


def test_a_supervisor_in_another_thread_installs_no_handlers(tmp_path: Path) -> None:
    results: list[Walk] = []
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    thread = threading.Thread(target=lambda: results.append(Walk(tmp_path / "run", max_step=2).run()))
    thread.start()
    thread.join()
    assert results[0].sv.ending.finished
    assert before == {n: signal.getsignal(n) for n in before}


def test_ctrl_c_at_a_prompt_saves_and_keeps_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    walk = Walk(tmp_path / "run", max_step=8)
    with nothing_left(), pytest.raises(KeyboardInterrupt, match="SIGINT"):
        walk.run(lambda sv, step: os.kill(os.getpid(), signal.SIGINT) if step == 4 else None)
    assert not walk.sv.ending.finished and "SIGINT" in walk.sv.ending.reason
    assert (tmp_path / "run" / "checkpoints" / "step-00000004").is_dir()


STEPS = 12


class Struck(CursorWrapper):
    """Numbers; the fetch of one of them fails, and the signal that is to blame comes with the error."""

    fetch_error_may_be_signal = True
    at, number = -1, None

    def __next__(self) -> Any:
        if self.position()["batches"] == self.at:
            if self.number is not None:
                os.kill(os.getpid(), self.number)
            raise DataError("a worker died")
        return next(self.cursor)


class Struckable(StreamWrapper):
    def __init__(self, at: int = -1, number: int | None = None) -> None:
        super().__init__(arrays(np.arange(STEPS), batch_size=1))
        self.at, self.number = at, number

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Struck:
        cursor = Struck(self.stream.open(purpose, pass_index, position, seed=seed))
        cursor.at, cursor.number = self.at, self.number
        return cursor


def train(run_dir: Path, door: str, stream: Struckable) -> tuple[list[float], Any]:
    w = np.zeros(1)
    services = [everstep.Checkpoints(Every(steps=4)), everstep.services.Console(sink=lambda line: None)]
    arguments: dict[str, Any] = {"state": {"w": w}, "services": services, "seed": 1}
    if door == "loop":
        with everstep.TrainLoop(run_dir, max_epoch=1, **arguments) as loop:
            for _ in loop.iter_epochs():
                for _, (x,) in loop.iter_steps(stream):
                    w += x[0] * np.random.random()
        return w.tolist(), loop.ending.digest
    with everstep.Supervisor(run_dir, max_step=STEPS // 2, **arguments) as sv:
        batches = sv.stream(stream, passes=1)
        while not sv.should_stop():
            for _ in range(2):  # the state has changed when the second fetch of a step fails
                (x,) = next(batches)
                w += x[0] * np.random.random()
            sv.advance()
    return w.tolist(), sv.ending.digest


@pytest.mark.parametrize("door", ["loop", "supervisor"])
def test_an_error_that_comes_with_a_signal_is_the_interruption(tmp_path: Path, door: str) -> None:
    with pytest.raises(SystemExit) as ended:
        train(tmp_path / "run", door, Struckable(9, signal.SIGTERM))
    assert ended.value.code == 128 + signal.SIGTERM
    assert train(tmp_path / "run", door, Struckable()) == train(tmp_path / "whole", door, Struckable())


@pytest.mark.parametrize("door", ["loop", "supervisor"])
def test_an_error_without_a_signal_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(SignalWatch, "received_within", lambda watch, seconds: asked.append(seconds))
    with pytest.raises(DataError, match="a worker died"):
        train(tmp_path / "run", door, Struckable(9))
    assert len(asked) == 1 and asked[0] > 0
    assert train(tmp_path / "run", door, Struckable()) == train(tmp_path / "whole", door, Struckable())
