"""Watching a run that another process trains: each checkpoint once, whoever is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_task import TinyTask, trainer
from watch_program import door

import everstep
import warm
from everstep.proof.compare import compare_runs
from everstep.record import RunJournal
from waiting import until

HERE = Path(__file__).parent


def process(what: str, run_dir: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join([*map(str, (HERE, HERE.parent)), os.environ.get("PYTHONPATH", "")])
    return warm.Popen(
        [sys.executable, str(HERE / "watch_program.py"), what, str(run_dir)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.campaign("long")
def test_both_are_killed_and_nothing_is_evaluated_twice_or_missed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    watcher, training = process("watch", run), process("train", run)
    until(lambda: (run / "evaluations").exists() and len(everstep.evaluations(run)) >= 5)
    watcher.kill()
    until(lambda: len(names(run)) >= 12)
    training.kill()
    for killed in (watcher, training):
        killed.communicate()
        assert killed.returncode == -signal.SIGKILL
    before = everstep.evaluations(run)
    watcher, training = process("watch", run), process("train", run)
    said, _ = watcher.communicate()
    trained, _ = training.communicate()
    assert (watcher.returncode, training.returncode) == (0, 0), said + trained
    found = everstep.evaluations(run)
    assert found[: len(before)] == before
    assert {(one.stream, one.checkpoint) for one in found} == {
        (stream, name) for stream in ("valid", "test") for name in names(run)
    }
    assert max(Counter((one.stream, one.checkpoint, one.digest) for one in found).values()) == 1
    straight = process("train", tmp_path / "straight")
    straight.communicate()
    assert compare_runs(tmp_path / "straight", run) == []


def test_each_checkpoint_in_order_then_none(tmp_path: Path) -> None:
    door(tmp_path / "run", steps=6).run_training()
    found = list(door(tmp_path / "run").watch())
    assert [one.checkpoint for one in found] == [
        "epoch-0000-step-00000000",
        *(f"step-0000000{step}" for step in (1, 2, 3)),
        "epoch-0001-step-00000004",
        "step-00000005",
        "epoch-0002-step-00000006",
    ]
    task = TinyTask()
    for one in found:
        everstep.load(tmp_path / "run" / "checkpoints" / one.checkpoint, task.state())
        loss = sum((i - task.w[0]) ** 2 for i in range(5)) / 5
        assert one.metrics["valid/loss"] == pytest.approx(loss) and one.epoch == (one.step + 3) // 4
    in_the_loop = [everstep.Evaluate("valid", everstep.Every(steps=1), validate_first=True)]
    trainer(tmp_path / "loop", services=in_the_loop, max_step=6).run_training()
    for name in ("valid/loss", "valid/noise"):
        assert [one.metrics[name] for one in found] == RunJournal(tmp_path / "loop").series(name)[1]
    assert everstep.evaluations(tmp_path / "run") == found
    assert list(door(tmp_path / "run").watch()) == []
    assert len(list(door(tmp_path / "run").watch("test"))) == 7
    door(tmp_path / "run", steps=7).run_training()
    newer = [one.checkpoint for one in door(tmp_path / "run").watch()]
    assert newer == ["step-00000006", "epoch-0002-step-00000007"]  # the epoch went on inside


def test_only_the_newest(tmp_path: Path) -> None:
    door(tmp_path / "run", steps=6).run_training()
    assert [one.step for one in door(tmp_path / "run").watch(every="newest")] == [6]


@pytest.mark.campaign("timed")
def test_throttled(tmp_path: Path) -> None:
    door(tmp_path / "run", steps=1).run_training()
    began = time.monotonic()
    assert len(list(door(tmp_path / "run").watch(throttle=0.5))) == 2
    assert time.monotonic() - began >= 0.5


def test_a_run_that_stopped_early_has_ended(tmp_path: Path) -> None:
    class Constant(TinyTask):
        def eval_step(self, batch: Any) -> Mapping[str, Any]:
            return {"loss": 1.0}

    services = [everstep.EarlyStop("valid/loss", patience=1)]
    trainer(tmp_path / "run", Constant(), services=services, max_epoch=9).run_training()
    assert [one.epoch for one in trainer(tmp_path / "run", Constant()).watch(timeout=None)] == [0, 1, 2]


def test_a_run_that_is_not_there_or_was_left_is_given_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(door(tmp_path / "run").watch(timeout=0.0)) == []
    assert "it is not there" in capsys.readouterr().out
    left = door(tmp_path / "run", steps=6)
    with left.open() as loop:
        for _ in loop.iter_epochs():
            left.epoch()
            break
    assert [one.step for one in door(tmp_path / "run").watch(timeout=0.0)] == [0, 1, 2, 3, 4]
    assert "has not ended, and nobody trains it for 0 s" in capsys.readouterr().out


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "run" / "checkpoints"

    class Deleting(TinyTask):
        states = 0

        def state(self) -> Mapping[str, Any]:  # asked for when the checkpoint has been chosen
            self.states += 1
            if self.states == deleting:
                shutil.rmtree(there / "step-00000001")
            return super().state()

    door(tmp_path / "run", steps=4).run_training()
    arrays = there / "step-00000002" / "arrays.safetensors"
    arrays.write_bytes(arrays.read_bytes()[:-1])  # cut: of what is not read, the bytes are not looked at
    deleting = 0
    watching = trainer(tmp_path / "run", task := Deleting()).watch()
    assert next(watching).step == 0
    deleting = task.states + 1
    assert [one.step for one in watching] == [3, 4]
    said = capsys.readouterr().out
    assert "checkpoint step-00000001 is passed over: it was deleted while it was read" in said
    assert "checkpoint step-00000002 is passed over: " in said and "damaged" in said
