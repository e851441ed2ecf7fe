"""Rows of tests/capabilities.md whose acceptance check belongs to no single room."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
import warm
from everstep.errors import Interrupted, ProgressError, StateError
from everstep.record import RunJournal
from everstep.testing import ManualClock
from tiny_runs import Tiny, events


def test_ctrl_c_in_the_middle_of_an_epoch_loses_no_step(tmp_path: Path) -> None:
    straight = Tiny(tmp_path / "straight", max_epoch=3).train()
    run = Tiny(tmp_path / "run", max_epoch=3)
    with pytest.raises(Interrupted) as raised:
        run.train(inside=lambda loop, step: os.kill(os.getpid(), signal.SIGINT) if step == 6 else None)
    assert raised.value.code == 130
    assert run.loop.ending.step == 6
    again = Tiny(tmp_path / "run", max_epoch=3).train()
    assert again.seen == straight.seen[6:]
    assert again.result() == straight.result()


def test_a_script_that_imports_jupyter_ends_by_ctrl_c_as_a_script(tmp_path: Path) -> None:
    """As libraries do: a script is not a notebook for that."""
    program = f"""
import ipykernel.ipkernel, os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from pathlib import Path
from tiny_runs import Tiny
ctrl_c = lambda loop, step: step == 6 and os.kill(os.getpid(), signal.SIGINT)
Tiny(Path({str(tmp_path / "run")!r}), max_epoch=3).train(inside=ctrl_c)
"""
    assert warm.run([sys.executable, "-c", program]).returncode == 130
    assert RunJournal(tmp_path / "run").status().step == 6


def test_several_reasons_to_save_at_one_step_are_one_checkpoint(tmp_path: Path) -> None:
    every = everstep.Every(steps=2) | everstep.At(4) | everstep.Every(epochs=1)
    announced: list[str] = []
    tiny = Tiny(tmp_path / "run", max_epoch=1, services=[everstep.Checkpoints(every, keep_last=None)])
    tiny.loop.on(everstep.Moment.AFTER_CHECKPOINT, lambda boundary: announced.append(boundary.payload))
    tiny.train(inside=lambda loop, step: loop.make_checkpoint())
    written = Counter(event["name"] for event in events(tmp_path / "run", "checkpoint"))
    assert set(written.values()) == {1}
    assert set(announced) <= written.keys()
    assert {*(f"step-0000000{step}" for step in (1, 2, 3)), "epoch-0001-step-00000004"} < written.keys()


def train_linear(run: Path, *, optimizer_in_state: bool, step: bool) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer} if optimizer_in_state else {"model": model}
    with everstep.TrainLoop(run, state, max_epoch=2) as loop:
        for _ in loop.iter_epochs():
            for _, batch in loop.iter_steps([torch.ones(1, 2)] * 3):
                model(batch).sum().backward()
                if step:
                    optimizer.step()


def test_an_optimizer_that_never_steps_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProgressError, match=r"3 steps .* call optimizer\.step\(\)"):
        train_linear(tmp_path / "run", optimizer_in_state=True, step=False)


def test_an_optimizer_that_the_state_lacks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"SGD .* add it"):
        train_linear(tmp_path / "run", optimizer_in_state=False, step=True)


def test_the_parts_of_the_time_sum_to_the_whole(tmp_path: Path) -> None:
    clock = ManualClock()

    class Slow:
        def __iter__(self) -> Any:
            for _ in range(4):
                clock.advance(0.25)
                yield ()

    seen: dict[str, float] = {}

    def printed(boundary: everstep.Boundary) -> None:
        seen.update({name: stats.mean * stats.count for name, stats in boundary.payload.items()})

    with everstep.TrainLoop(tmp_path / "run", {"a": []}, max_epoch=1, clock=clock) as loop:
        loop.on(everstep.Moment.TIME_METRIC_STATS_PRINTED, printed)
        for _ in loop.iter_epochs():
            for _ in loop.iter_steps(everstep.data.replay(Slow())):
                clock.advance(1.0)
            with loop.evaluation(), loop.timeit("valid_time"):
                clock.advance(3.0)
            loop.print_logs()
    (times,) = events(tmp_path / "run", "times")
    assert seen == {"step_time": 4.0, "valid_time": 3.0, "epoch_time": 8.0}
    assert times["data_wait"] == 1.0
    assert times["seconds"] == seen["step_time"] + seen["valid_time"] + times["data_wait"]


def test_evaluating_on_the_training_loader_leaves_the_training_where_it_is(tmp_path: Path) -> None:
    def train(name: str, evaluate: bool) -> list[int]:
        torch.manual_seed(3)
        data = torch.utils.data.DataLoader(torch.arange(5), batch_size=1, shuffle=True)
        seen: list[int] = []
        with everstep.TrainLoop(tmp_path / name, {"a": []}, max_epoch=4, steps_per_epoch=3) as loop:
            for _ in loop.iter_epochs():
                for _, batch in loop.iter_steps(data):
                    seen.append(int(batch))
                if evaluate:
                    with loop.evaluation():
                        assert sorted(int(batch) for batch in data) == [0, 1, 2, 3, 4]
        return seen

    assert train("with", True) == train("without", False)


def test_a_state_without_the_model_is_refused_at_entry(tmp_path: Path) -> None:
    """A resume would give a new model the old optimizer's moments."""
    model, second = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *second.parameters()], lr=0.1)
    with pytest.raises(StateError, match=r"parameter 0 \(1, 2\) of 'optimizer'.* add the model"):
        everstep.TrainLoop(tmp_path / "run", {"optimizer": optimizer}).__enter__()
    with pytest.raises(StateError, match=r"parameter 2 \(1, 2\) of 'optimizer'.* add the model"):
        everstep.TrainLoop(tmp_path / "run", {"model": model, "optimizer": optimizer}).__enter__()


def test_training_without_any_state_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        with everstep.TrainLoop(tmp_path / "run", max_epoch=3) as loop:
            for _ in loop.iter_epochs():
                for _, batch in loop.iter_steps([torch.ones(1, 2)] * 3):
                    model(batch).sum().backward()
                    optimizer.step()

    with pytest.raises(StateError, match="SGD of arrays that are not in the state"):
        train()


def test_an_exception_leaves_every_completed_step_in_the_record(tmp_path: Path) -> None:
    def train() -> None:
        with everstep.TrainLoop(tmp_path, {"w": [0]}, max_epoch=1) as loop:
            for _ in loop.iter_epochs():
                for step, _ in loop.iter_steps(range(90)):
                    loop.collect_metrics(loss=1.0 / step)
                    if step == 40:
                        raise RuntimeError("the camera is gone")

    with pytest.raises(RuntimeError, match="camera"):
        train()
    steps, _ = RunJournal(tmp_path).series("loss", "step")
    assert list(steps) == list(range(1, 40))
