"""The third door: it trains, evaluates and resumes as the program that anyone could have written."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_task import TinyTask, numbers, trainer

import everstep
from everstep.errors import ConfigError, UsageError
from everstep.record import RunJournal
from everstep.testing import ManualClock
from tiny_runs import Boom, Tiny, rows


def test_it_is_the_hand_written_loop(tmp_path: Path) -> None:
    hand = Tiny(tmp_path / "hand", max_epoch=2).train()
    door = trainer(tmp_path / "door")
    ending = door.run_training()
    assert ending.finished and ending.step == 8
    assert door.task.w.tobytes() == hand.w.tobytes()  # type: ignore[attr-defined]
    for phase in ("step", "epoch"):
        assert rows(tmp_path / "door", phase) == rows(tmp_path / "hand", phase)


def test_two_frames_of_ours_to_the_step(tmp_path: Path) -> None:
    frames: list[str] = []

    class Looking(TinyTask):
        def train_step(self, batch: Any) -> Mapping[str, Any]:
            stack = [f.function for f in inspect.stack() if "/everstep/" in f.filename]
            frames[:] = stack
            return super().train_step(batch)

    trainer(tmp_path / "run", Looking()).run_training()
    assert frames == ["_epoch", "run_training"]


def test_every_stream_has_its_own_metrics(tmp_path: Path) -> None:
    services = [everstep.Evaluate(name) for name in ("valid", "test")]
    trainer(tmp_path / "run", services=services).run_training()
    for name in ("valid", "test"):
        found = rows(tmp_path / "run", f"eval/{name}")
        assert [(row[0], row[1], row[3]) for row in found] == [
            (epoch, step, f"{name}/{metric}")
            for epoch, step in ((1, 4), (2, 8))
            for metric in ("loss", "noise")
        ]


def test_valid_is_evaluated_each_epoch_unless_something_else_is_said(tmp_path: Path) -> None:
    trainer(tmp_path / "unsaid").run_training()
    trainer(tmp_path / "test only", services=[everstep.Evaluate("test")]).run_training()
    assert len(rows(tmp_path / "unsaid", "eval/valid")) == 4
    assert not rows(tmp_path / "test only", "eval/valid")


def test_the_baseline_is_recorded_at_step_0_and_is_no_training(tmp_path: Path) -> None:
    done = trainer(tmp_path / "run", services=[everstep.Evaluate(validate_first=True)]).run_training()
    steps = [row[1] for row in rows(tmp_path / "run", "eval/valid") if row[3] == "valid/loss"]
    assert steps == [0, 4, 8] and done.step == 8


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(
    ("every", "fires"),
    [
        (everstep.Every(steps=3), [3, 6, 9, 12]),
        (everstep.Every(steps=4), [4, 8, 12]),
        (everstep.Every(epochs=2), [8]),
        (everstep.Every(epochs=1) | everstep.Every(steps=5), [4, 5, 8, 10, 12]),
    ],
    ids=str,
)
def test_evaluation_fires_at_multiples_also_after_a_resume(
    tmp_path: Path, every: everstep.schedule.Schedule, fires: list[int]
) -> None:
    def evaluate() -> everstep.Evaluate:
        return everstep.Evaluate("valid", every)

    trainer(tmp_path / "run", services=[evaluate()], max_epoch=3).train(5)
    trainer(tmp_path / "run", services=[evaluate()], max_epoch=3).run_training()
    trainer(tmp_path / "straight", services=[evaluate()], max_epoch=3).run_training()
    found = rows(tmp_path / "run", "eval/valid")
    assert found == rows(tmp_path / "straight", "eval/valid")
    assert [row[1] for row in found if row[3] == "valid/loss"] == fires


def test_evaluation_every_seconds_fires_when_they_are_over(tmp_path: Path) -> None:
    clock = ManualClock()

    class Slow(TinyTask):
        def train_step(self, batch: Any) -> Mapping[str, Any]:
            clock.advance(1.0)
            return super().train_step(batch)

    every_step = everstep.Checkpoints(everstep.Every(steps=1))  # the loop asks the schedule at each step
    services = [everstep.Evaluate("valid", everstep.Every(seconds=2.5)), every_step]
    for limit in (4, 12):
        trainer(tmp_path / "run", Slow(), services=services, max_epoch=3, clock=clock).train(limit)
    assert RunJournal(tmp_path / "run").series("valid/loss")[0] == [3, 7, 10]


def test_the_mean_is_that_of_the_samples_also_with_a_short_last_batch(tmp_path: Path) -> None:
    class Values(TinyTask):
        def eval_step(self, batch: Any) -> Mapping[str, Any]:
            return {"x": float(np.mean(batch[0]))}

    door = trainer(tmp_path / "run", Values())
    door.train(1)
    assert door.evaluate("valid") == {"valid/x": 2.0}  # of 0 1 | 2 3 | 4, whose batches' mean is 2.33
    assert door.evaluate("valid", 2) == {"valid/x": 1.5}


def test_epochs_of_a_fixed_size_go_on_in_the_pass(tmp_path: Path) -> None:
    task = TinyTask()
    streams = {"train": numbers(5, 1)}
    trainer(tmp_path / "run", task, streams=streams, steps_per_epoch=3).run_training()
    assert task.seen == [(0,), (1,), (2,), (3,), (4,), (0,)]


def test_logs_pass_by_the_step_and_a_clash_names_the_key(tmp_path: Path) -> None:
    class Logging(TinyTask):
        name = "file"

        def next_eval_inputs(self, batches: Iterator[Any]) -> tuple[Any, Mapping[str, Any]]:
            return next(batches), {self.name: ["a.png"]}

        def eval_begin(self) -> Any:
            self.files: list[str] = []

        def eval_reduce(self, state: Any, outputs: Mapping[str, Any]) -> Any:
            assert state is None
            self.files += outputs["file"]

    task = Logging()
    door = trainer(tmp_path / "run", task)
    door.train(1)
    assert set(door.evaluate("valid")) == {"valid/loss", "valid/noise"}
    assert task.files == ["a.png"] * 3
    task.name = "loss"
    with pytest.raises(UsageError, match=r"stream 'valid': 'loss' is a log .* give one of them another name"):
        door.evaluate("valid")


def test_predictions_come_batch_by_batch(tmp_path: Path) -> None:
    door = trainer(tmp_path / "run")
    door.train(1)
    w = door.task.w[0]  # type: ignore[attr-defined]
    assert [list(p) for p in door.predict("test")] == [[0.0, w], [2 * w]]
    assert [list(p) for p in door.predict([(np.array([1.0]),)])] == [[w]]


def test_an_epoch_of_your_own(tmp_path: Path) -> None:
    task = TinyTask()
    door = trainer(tmp_path / "run", task, streams={"extra": numbers(4, 2)})
    with door.open() as loop:
        for _ in loop.iter_epochs():
            door.epoch(["train", "extra"], ["valid", [(np.array([9]),)]])
    names = {row[3] for row in rows(tmp_path / "run", "step")}
    assert names == {"loss", "extra/loss"}
    assert {row[3] for row in rows(tmp_path / "run", "tail")} == {
        "valid/loss",
        "valid/noise",
        "valid2/loss",
        "valid2/noise",
    }


def test_what_is_built_follows_from_the_seed_and_initialize_comes_only_once(tmp_path: Path) -> None:
    class Building(TinyTask):
        started = 0

        def state(self) -> Mapping[str, Any]:
            return {**super().state(), "model": self.model}

        def build_model(self) -> Any:
            return np.random.standard_normal(3)

        def build_optimizer(self, model: Any) -> Any:
            assert model is self.model

        def initialize(self) -> None:
            self.started += 1

    tasks = [Building() for _ in range(3)]
    for task, name in zip(tasks, ("one", "two", "two"), strict=True):
        trainer(tmp_path / name, task).train(1)
    assert tasks[0].model.tobytes() == tasks[1].model.tobytes()
    assert [task.started for task in tasks] == [1, 1, 0]


def test_hooks_around_the_steps_of_an_epoch(tmp_path: Path) -> None:
    class Around(TinyTask):
        def train_loop_begin(self) -> None:
            self.trace.append("begin")

        def train_loop_end(self) -> Mapping[str, Any]:
            self.trace.append("end")
            return {"seen": len(self.seen)}

    task = Around()
    trainer(tmp_path / "run", task).run_training()
    assert task.trace == ["begin", "end"] * 2
    assert [row[3] for row in rows(tmp_path / "run", "tail")] == ["seen", "seen"]


def test_the_line_of_an_epoch_has_its_evaluation(tmp_path: Path) -> None:
    lines: list[str] = []
    services = [everstep.EarlyStop("valid/loss", patience=9), everstep.Evaluate(validate_first=True)]
    trainer(tmp_path / "run", lines=lines, services=services).run_training()
    found = [line for line in lines if line.startswith("[Epoch")]
    tags = [line.partition("]")[0] for line in found]
    assert tags == [
        "[Epoch 1/2, Step 0",
        "[Epoch 1/2, Step 4",
        "[Epoch 2/2, Step 8",
    ]
    assert not any("±" in line.partition("valid/loss")[2].partition(";")[0] for line in found)
    assert "valid/loss" in found[0] and "(*)" in found[0] and "] loss:" not in found[0]
    assert all("valid/eval time: " in line for line in found)


def test_the_eta_counts_evaluation_apart(tmp_path: Path) -> None:
    clock = ManualClock()

    class Slow(TinyTask):
        def train_step(self, batch: Any) -> Mapping[str, Any]:
            clock.advance(1.0)
            return super().train_step(batch)

        def eval_step(self, batch: Any) -> Mapping[str, Any]:
            clock.advance(100.0)
            return super().eval_step(batch)

    door = trainer(tmp_path / "run", Slow(), max_epoch=4, clock=clock)
    etas = []
    with door.open() as loop:
        for _ in loop.iter_epochs():
            etas.append(loop.get_eta())
            door.epoch()
    assert etas[2] == 8 * 1.0 + 2 * 300.0
    times = [row.value for row in RunJournal(tmp_path / "run").rows() if row.name == "valid/eval_time"]
    assert times == [300.0] * 4


def test_a_smoke_test_tries_everything_once_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    task, straight = TinyTask(), TinyTask()
    task.eval_step = lambda batch: task.trace.append("eval") or {"loss": 1.0}  # type: ignore[method-assign, func-returns-value]
    door = trainer(tmp_path / "run", task, services=[everstep.Evaluate("test")])
    np.random.seed(5)
    before = np.random.get_state()[1].tobytes()  # type: ignore[union-attr, index]
    door.smoke_test()
    assert np.random.get_state()[1].tobytes() == before  # type: ignore[union-attr, index]
    assert len(task.seen) == 1 and task.trace == ["eval"]
    assert not task.w.any() and not task.momentum.any()
    assert not (tmp_path / "run").exists() and not list((tmp_path / "tmp").iterdir())
    door.run_training()
    trainer(tmp_path / "straight", straight).run_training()
    assert task.w.tobytes() == straight.w.tobytes()


def test_a_smoke_test_evaluates_with_the_statistics_and_functions_of_the_service(tmp_path: Path) -> None:
    def smoke_test(**how: Any) -> None:
        trainer(tmp_path / "run", services=[everstep.Evaluate("valid", **how)]).smoke_test()

    def broken(*results: Any) -> Any:
        raise Boom

    with pytest.raises(ConfigError, match=r"stats= asks for 'los'.*did you mean 'loss'"):
        smoke_test(stats={"los": "std"})
    for name in ("agg_func", "online_agg_func"):
        with pytest.raises(Boom):
            smoke_test(**{name: broken})
    smoke_test(stats={"loss": "std"}, agg_func=lambda results: {"batches": len(results)})


# --------------------------------------------------------------------------------- bad input
