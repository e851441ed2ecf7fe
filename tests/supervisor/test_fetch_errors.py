"""An error of a fetch that a signal is to blame for: the interruption, behind every door."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everstep
from everstep.data import arrays
from everstep.errors import DataError
from everstep.schedule import Every
from everstep.supervisor.threads.signals import SignalWatch

STEPS = 12


class Struck(everstep.data.Cursor):
    """Numbers; the fetch of one of them fails, and the signal that is to blame comes with the error."""

    def __init__(self, inner: Any, at: int, number: int | None) -> None:
        self.inner, self.at, self.number = inner, at, number
        self.fetch_error_may_be_signal = True

    def __next__(self) -> Any:
        if self.inner.position()["batches"] == self.at:
            if self.number is not None:
                os.kill(os.getpid(), self.number)
            raise DataError("a worker died")
        return next(self.inner)

    def position(self) -> Any:
        return self.inner.position()


class Struckable(everstep.data.Stream):
    def __init__(self, at: int = -1, number: int | None = None) -> None:
        self.data, self.at, self.number = arrays(np.arange(STEPS), batch_size=1), at, number

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Struck:
        return Struck(self.data.open(purpose, pass_index, position, seed=seed), self.at, self.number)

    def describe(self, seed: int) -> Any:
        return self.data.describe(seed)


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
