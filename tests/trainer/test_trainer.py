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
from everstep.errors import ConfigError, DataError, MetricError, NoCheckpointError, UsageError
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


def test_evaluating_changes_nothing_in_the_training(tmp_path: Path) -> None:
    often, never = TinyTask(), TinyTask()
    evaluate = everstep.Evaluate("valid", everstep.Every(steps=1), validate_first=True)
    trainer(tmp_path / "often", often, services=[evaluate]).run_training()
    trainer(tmp_path / "never", never, services=[everstep.Evaluate("test", everstep.Never())]).run_training()
    assert often.w.tobytes() == never.w.tobytes() and often.seen == never.seen
    assert rows(tmp_path / "often", "step") == rows(tmp_path / "never", "step")


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


def test_early_stop_sees_the_evaluation_of_its_own_boundary(tmp_path: Path) -> None:
    class Constant(TinyTask):
        def eval_step(self, batch: Any) -> Mapping[str, Any]:
            return {"loss": 1.0}

    stop = everstep.EarlyStop("valid/loss", patience=2)
    ending = trainer(tmp_path / "run", Constant(), services=[stop], max_epoch=9).run_training()
    assert ending.epoch == 3 and "early stop: valid/loss" in ending.reason


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


def test_state_is_passed_through_an_evaluation(tmp_path: Path) -> None:
    class Sum(TinyTask):
        def eval_begin(self) -> Any:
            return []

        def eval_step(self, batch: Any) -> Mapping[str, Any]:
            return {"each": batch[0], "loss": 1.0}

        def eval_reduce(self, state: Any, outputs: Mapping[str, Any]) -> Any:
            return [*state, *outputs["each"]]

        def eval_end(self, state: Any) -> Mapping[str, Any]:
            return {"sum": sum(state)}

    door = trainer(tmp_path / "run", Sum())
    door.train(1)
    assert door.evaluate("valid") == {"valid/loss": 1.0, "valid/sum": 10.0}


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


def test_training_inputs_may_be_made_of_several_batches(tmp_path: Path) -> None:
    class Pairs(TinyTask):
        def next_train_inputs(self, batches: Iterator[Any]) -> Any:
            return (np.concatenate([next(batches)[0], next(batches)[0]]),)

    def run(name: str, *limits: int) -> bytes:
        for limit in limits:
            task = Pairs()
            trainer(tmp_path / name, task).train(limit)
        assert {len(ids) for ids in task.seen} == {4}
        return task.w.tobytes()

    assert run("resumed", 1, 2, 4) == run("straight", 4)
    assert rows(tmp_path / "resumed", "step") == rows(tmp_path / "straight", "step")


def test_a_second_call_goes_on_in_the_same_objects(tmp_path: Path) -> None:
    door, straight = trainer(tmp_path / "run"), trainer(tmp_path / "straight")
    assert door.train(3).step == 3
    door.evaluate("valid")
    assert door.train(8).step == 8
    straight.train(8)
    assert door.task.w.tobytes() == straight.task.w.tobytes()  # type: ignore[attr-defined]


def test_a_finished_run_still_evaluates_and_nothing_is_evaluated_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="train first"):
        trainer(tmp_path / "run").evaluate("valid")
    first = trainer(tmp_path / "run")
    first.run_training()
    loss = first.evaluate("valid")["valid/loss"]
    again, fresh = trainer(tmp_path / "run"), trainer(tmp_path / "run")
    assert again.run_training().finished and not again.task.seen  # type: ignore[attr-defined]
    assert again.evaluate("valid")["valid/loss"] == loss
    assert fresh.run_evaluation("valid")["valid/loss"] == loss
    assert fresh.task.w.tobytes() == first.task.w.tobytes()  # type: ignore[attr-defined]


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


def test_an_epoch_that_is_left_is_evaluated_when_it_is_closed(tmp_path: Path) -> None:
    door = trainer(tmp_path / "run")
    with door.open() as loop:
        for _ in loop.iter_epochs():
            door.epoch()
            break
    assert [row[1] for row in rows(tmp_path / "run", "eval/valid")] == [4, 4]
    assert door.run_training().epoch == 2


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


def test_a_smoke_test_that_fails_leaves_nothing_either(tmp_path: Path) -> None:
    class Failing(TinyTask):
        def eval_step(self, batch: Any) -> Mapping[str, Any]:
            raise Boom

    task = Failing()
    with pytest.raises(Boom):
        trainer(tmp_path / "run", task).smoke_test()
    assert not task.w.any() and not (tmp_path / "run").exists()


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


def returning(value: Any) -> TinyTask:
    task = TinyTask()
    task.train_step = lambda batch: value  # type: ignore[method-assign]
    return task


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"train_step returned None; return a mapping"),
        (0.5, r"train_step returned 0\.5; return a mapping"),
        ({"loss": "low"}, r"metric 'loss' is 'low'"),
    ],
)
def test_a_step_that_returns_no_metrics_is_an_error(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(MetricError, match=message):
        trainer(tmp_path / "run", returning(value)).run_training()


def test_misuse_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'valid'"):
        trainer(tmp_path / "run", services=[everstep.Evaluate("vald")])
    with pytest.raises(ConfigError, match="did you mean 'max_epoch'"):
        trainer(tmp_path / "run", max_epochs=3)
    with pytest.raises(ConfigError, match=r"Trainer\(\) has no argument 'state'"):
        trainer(tmp_path / "run", state={})
    with pytest.raises(ConfigError, match=r"derived from everstep\.Task"):
        everstep.Trainer(object(), {}, tmp_path / "run")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give names to data"):
        everstep.Trainer(TinyTask(), [1], tmp_path / "run")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no stream is named 'train'"):
        everstep.Trainer(TinyTask(), {}, tmp_path / "run", max_epoch=1).run_training()
    with pytest.raises(ConfigError, match="num_steps=0: give an integer"):
        everstep.Evaluate("valid", num_steps=0)
    with pytest.raises(ConfigError, match="give the service to a Trainer's services="):
        with everstep.TrainLoop(tmp_path / "loop", services=[everstep.Evaluate("valid")]):
            pass


def test_data_that_keeps_its_own_place_is_not_trained_on_and_evaluated(tmp_path: Path) -> None:
    class Own:
        def __iter__(self) -> Iterator[Any]:
            return iter([(np.array([1]),)])

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            pass

    own = Own()
    with pytest.raises(ConfigError, match=r"reads the Own that the training .* give a second one"):
        trainer(tmp_path / "run", streams={"train": own, "valid": own})
    trainer(tmp_path / "run", streams={"train": own, "valid": Own()}).run_training()


def test_a_task_without_the_step_that_is_asked_of_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Task has no train_step; give the class one"):
        everstep.Trainer(everstep.Task(), {"train": [1]}, tmp_path / "run", max_epoch=1).run_training()


def test_a_stream_without_a_batch_is_an_error(tmp_path: Path) -> None:
    door = trainer(tmp_path / "run", streams={"valid": []})
    with pytest.raises(DataError, match="stream 'valid' gave no batch to evaluate"):
        door.run_training()


def test_an_evaluation_that_fails_leaves_the_training_as_it_was(tmp_path: Path) -> None:
    class Failing(TinyTask):
        def eval_step(self, batch: Any) -> Mapping[str, Any]:
            np.random.standard_normal(9)
            raise Boom

    task = Failing()
    with pytest.raises(Boom):
        trainer(tmp_path / "run", task).run_training()
    well = TinyTask()
    trainer(tmp_path / "run", well).run_training()
    straight = TinyTask()
    trainer(tmp_path / "straight", straight).run_training()
    assert well.w.tobytes() == straight.w.tobytes()
    assert rows(tmp_path / "run") == rows(tmp_path / "straight")
