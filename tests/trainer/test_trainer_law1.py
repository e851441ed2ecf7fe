"""Law 1 at the third door: an error in any call of the task, at every place where it can come."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_task import TinyTask, trainer

import everstep
from everstep.proof.compare import compare_runs
from tiny_runs import Boom


class Crashing(TinyTask):
    """Raises at the given call; calls of the task are counted from 1."""

    def __init__(self, crash: int = 0) -> None:
        super().__init__()
        self.calls, self.crash = 0, crash

    def called(self) -> None:
        self.calls += 1
        if self.calls == self.crash:
            raise Boom

    def train_loop_begin(self) -> None:
        self.called()

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        self.called()
        return super().train_step(batch)

    def train_loop_end(self) -> Mapping[str, Any]:
        self.called()
        return {"weight": self.w[0]}

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        self.called()
        return super().eval_step(batch)


def start(run_dir: Path, every: everstep.schedule.Schedule, crash: int = 0) -> Crashing:
    task = Crashing(crash)
    services = [
        everstep.Evaluate("valid", everstep.Every(steps=3) | everstep.Every(epochs=1), validate_first=True),
        everstep.EarlyStop("valid/loss", patience=9),
        everstep.Best("valid/loss"),
        everstep.Checkpoints(every),
    ]
    trainer(run_dir, task, services=services).run_training()
    return task


@pytest.mark.parametrize(
    "every", [everstep.Never(), everstep.Every(steps=1), everstep.Every(steps=3)], ids=str
)
def test_a_run_that_crashed_anywhere_is_the_run_that_did_not(
    tmp_path: Path, every: everstep.schedule.Schedule
) -> None:
    calls = start(tmp_path / "straight", everstep.Never()).calls
    assert calls > 20
    for crash in range(1, calls + 1):
        run_dir = tmp_path / str(crash)
        with pytest.raises(Boom):
            start(run_dir, every, crash)
        start(run_dir, every)
        assert compare_runs(tmp_path / "straight", run_dir) == [], crash


@pytest.mark.parametrize("batch", range(1, 6))
def test_ctrl_c_in_an_evaluation_loses_nothing(tmp_path: Path, batch: int) -> None:
    class Interrupted(TinyTask):
        batches = 0

        def eval_step(self, given: Any) -> Mapping[str, Any]:
            self.batches += 1
            if self.batches == batch:
                os.kill(os.getpid(), signal.SIGINT)
            return super().eval_step(given)

    trainer(tmp_path / "straight").run_training()
    with pytest.raises(SystemExit) as raised:
        trainer(tmp_path / "run", Interrupted()).run_training()
    assert raised.value.code == 130
    trainer(tmp_path / "run").run_training()
    assert compare_runs(tmp_path / "straight", tmp_path / "run") == []
