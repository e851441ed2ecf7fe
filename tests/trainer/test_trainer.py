"""The third door: it trains, evaluates and resumes as the program that anyone could have written."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_task import Notes, TinyTask, numbers, trainer

import everstep
from everstep import Best, Boundary, EarlyStop, Evaluate, Every, Outcome, Service
from everstep.errors import ConfigError, MetricError, UsageError
from everstep.metrics import MetricFormatter
from everstep.record import RunJournal
from everstep.services import Moment, Recovery, Stage, StopAfter
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


def test_the_epochs_line_is_as_the_options_say(tmp_path: Path) -> None:
    class Short(MetricFormatter):
        def format(self, name: str, stats: Any, is_best: bool) -> str:
            return f"<{name}>"

    lines: list[str] = []
    options = {"show_eta": False, "formatter": Short(), "lines": lines}
    trainer(tmp_path / "run", max_epoch=1, **options).run_training()
    (line,) = (line for line in lines if line.startswith("[Step 4]"))
    assert "<loss>" in line and "ETA" not in line


def test_every_stream_has_its_own_metrics(tmp_path: Path) -> None:
    services = [everstep.Evaluate(name) for name in ("valid", "test")]
    trainer(tmp_path / "run", services=services).run_training()
    trainer(tmp_path / "test only", services=[everstep.Evaluate("test")], max_epoch=1).run_training()
    assert not rows(tmp_path / "test only", "eval/valid")
    for name in ("valid", "test"):
        found = rows(tmp_path / "run", f"eval/{name}")
        assert [(row[0], row[1], row[3]) for row in found] == [
            (epoch, step, f"{name}/{metric}")
            for epoch, step in ((1, 4), (2, 8))
            for metric in ("loss", "noise")
        ]


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

        def eval_end(self, state: Any) -> Mapping[str, Any]:
            return {"files": len(self.files)}

    task = Logging()
    door = trainer(tmp_path / "run", task)
    door.train(1)
    found = door.evaluate("valid")
    assert found.keys() == {"valid/loss", "valid/noise", "valid/files"} and found["valid/files"] == 3
    assert task.files == ["a.png"] * 3
    task.name = "loss"
    with pytest.raises(
        UsageError, match=r"stream 'valid': 'loss' is both a log .* give one of them another name"
    ):
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
        def __init__(self) -> None:
            super().__init__()
            self.started: list[int] = Notes()

        def state(self) -> Mapping[str, Any]:
            return {**super().state(), "model": self.model}

        def build_model(self) -> Any:
            return np.random.standard_normal(3)

        def build_optimizer(self, model: Any) -> Any:
            assert model is self.model

        def initialize(self) -> None:
            self.started.append(1)

    tasks = [Building() for _ in range(3)]
    for task, name in zip(tasks, ("one", "two", "two"), strict=True):
        trainer(tmp_path / name, task).train(1)
    assert tasks[0].model.tobytes() == tasks[1].model.tobytes()
    assert [len(task.started) for task in tasks] == [1, 1, 0]


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


class Curriculum(TinyTask):
    """Makes its data harder from epoch to epoch, by an object that no checkpoint has."""

    def __init__(self, boom: int = 0) -> None:
        super().__init__()
        self.level, self.boom, self.calls = Notes(), boom, itertools.count(1)

    def train_loop_begin(self) -> None:
        self.level.append(self.epoch)

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        if next(self.calls) == self.boom:
            raise Boom
        return {**super().train_step(batch), "level": self.level[-1]}

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        return {**super().eval_step(batch), "epoch": self.epoch}


def test_a_task_has_the_number_of_its_epoch_also_after_a_resume(tmp_path: Path) -> None:
    every = everstep.Checkpoints(everstep.Every(steps=3))
    services = [every, everstep.Evaluate("valid", everstep.Every(epochs=1), validate_first=True)]
    trainer(tmp_path / "straight", Curriculum(), services=services).run_training()
    with pytest.raises(Boom):
        trainer(tmp_path / "run", Curriculum(8), services=services).run_training()
    again = Curriculum()
    trainer(tmp_path / "run", again, services=services).run_training()
    assert rows(tmp_path / "run") == rows(tmp_path / "straight")
    assert again.epoch == 2


@pytest.mark.parametrize("where", ["train_loop_begin", "train_loop_end"])
def test_a_task_that_counts_in_the_number_of_the_epoch_is_refused(tmp_path: Path, where: str) -> None:
    task = TinyTask()
    setattr(task, where, lambda: setattr(task, "epoch", task.epoch + 1))
    with pytest.raises(ConfigError, match="TinyTask has set its attribute epoch to 2 in epoch 1"):
        trainer(tmp_path / "run", task).run_training()


def test_a_task_whose_number_of_the_epoch_cannot_be_set_is_refused(tmp_path: Path) -> None:
    kind = type("Fixed", (TinyTask,), {"epoch": property(lambda self: 1)})
    with pytest.raises(ConfigError, match=r"Fixed\.epoch is a property that no Trainer can set"):
        trainer(tmp_path / "run", kind())


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


# -------------------- one writer


def inside(door: everstep.Trainer) -> None:
    with door.open() as loop:
        for _ in loop.iter_epochs():
            door.epoch("train", "valid")


def test_what_the_program_evaluates_the_default_service_leaves_to_it(tmp_path: Path) -> None:
    inside(trainer(tmp_path, max_epoch=3, services=[everstep.EarlyStop("valid/loss", patience=2)]))
    found = [(step, phase) for _, step, phase, name, *_ in rows(tmp_path) if name == "valid/loss"]
    assert found == [(4, "tail"), (8, "tail"), (12, "tail")]


def test_a_service_that_was_asked_for_and_the_program_are_two_writers(tmp_path: Path) -> None:
    for every in (Every(epochs=1), Every(steps=4)):
        door = trainer(tmp_path / str(every), services=[Evaluate("valid", every)])
        with pytest.raises(MetricError, match=r"is written at step 4 by .* and by") as raised:
            inside(door)
        assert "the program" in str(raised.value) and "service 'valid'" in str(raised.value)
    inside(trainer(tmp_path / "never", services=[Evaluate("valid", everstep.Never())]))


class Says(Service):
    """Returns a metric of this name."""

    stage = Stage.MEASURE

    def __init__(self, name: str, metric: str, every: everstep.schedule.Schedule) -> None:
        super().__init__(name, every)
        self.metric = metric

    def run(self, boundary: Boundary) -> Outcome | None:
        return Outcome({self.metric: 1.0})


def test_two_services_that_write_one_name_at_one_step(tmp_path: Path) -> None:
    def services(other: int) -> list[Service]:
        return [Says("a", "norm", Every(steps=2)), Says("b", "norm", Every(steps=other))]

    with pytest.raises(MetricError, match="'norm' is written at step 6 by service 'a' and by service 'b'"):
        Tiny(tmp_path / "run", max_epoch=2, services=services(3)).train()
    with pytest.raises(MetricError, match="'norm' is written at step 6 by service 'a' and by service 'b'"):
        Tiny(tmp_path / "run", max_epoch=2, services=services(3)).train()  # a resume knows who wrote
    Tiny(tmp_path / "apart", max_step=2, services=services(3)).train()


def test_a_name_twice_in_ones_own_loop_folds(tmp_path: Path) -> None:
    def twice(loop: Any, count: int) -> None:
        loop.collect_metrics(x=1.0)
        loop.collect_metrics(x=2.0)

    Tiny(tmp_path / "run", max_epoch=1).train(inside=twice, tail=twice)
    steps = [row for row in rows(tmp_path / "run", "step") if row[3] == "x"]
    assert [(float.fromhex(bits), count) for *_, bits, count in steps] == [(1.5, 2)] * 4
    tail = [row for row in rows(tmp_path / "run", "tail") if row[3] == "x"]
    assert [(seq, float.fromhex(bits)) for *_, seq, bits, _ in tail] == [(0, 1.0), (1, 2.0)]


def test_two_services_on_one_stream_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    both = [Evaluate("valid", Every(steps=3)), Evaluate("valid", name="at the end")]
    with pytest.raises(ConfigError, match=r"'valid' and 'at the end' both evaluate stream 'valid'.* \| "):
        trainer(tmp_path / "run", services=both)
    assert not (tmp_path / "run").exists()
    quick = {"valid": numbers(5, 2), "quick": numbers(5, 2)}
    pair = [Evaluate("valid"), Evaluate("quick", Every(steps=2), num_steps=1)]
    trainer(tmp_path / "two names", streams=quick, services=pair).run_training()


# -------------------- what is said


class Lines(list[str]):
    def having(self, part: str) -> list[str]:
        return [line for line in self if part in line]


def said(run_dir: Path, task: everstep.Task | None = None, **arguments: Any) -> Lines:
    lines = Lines()
    trainer(run_dir, task, lines=lines, **arguments).run_training()
    return lines


class Ending(TinyTask):
    """Ends the run from inside, which nothing else does."""

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        if len(self.seen) == 6:
            raise KeyboardInterrupt
        return super().train_step(batch)


def test_a_training_without_an_end_says_so(tmp_path: Path) -> None:
    lines = Lines()
    endless = trainer(tmp_path / "run", Ending(), lines=lines, max_epoch=None, services=[Recovery()])
    with pytest.raises(KeyboardInterrupt):
        endless.run_training()
    (line,) = lines.having("no limit")
    assert "give max_epoch=, max_step= or max_time=" in line
    limits: list[dict[str, Any]] = [
        {"max_step": 2},
        {"max_time": 1000.0, "max_step": 2},
        {"services": [StopAfter(epochs=1)]},
        {"services": [EarlyStop("loss", patience=1, threshold=1e9)]},
    ]
    for number, given in enumerate(limits):
        assert not said(tmp_path / str(number), **{"max_epoch": None, **given}).having("no limit")


def test_a_metric_that_an_evaluation_did_not_find_is_said_at_once(tmp_path: Path) -> None:
    class Looking(TinyTask):
        def train_step(self, batch: Any) -> Mapping[str, Any]:
            if len(self.seen) == 3:
                said_at_step_3.extend(lines.having("no value of"))
            return super().train_step(batch)

    said_at_step_3: list[str] = []
    lines = Lines()
    watching = [EarlyStop("valid/los", "min", patience=9), Best("valid/loss")]
    watching += [Best("test/top1", "max"), Best("other", "max")]
    services = [*watching, Evaluate("valid", Every(steps=2)), Evaluate("test", Every(epochs=2))]
    trainer(tmp_path, Looking(), lines=lines, max_epoch=2, services=services).run_training()
    assert len(said_at_step_3) == 1
    assert "no value of 'valid/los'; did you mean 'valid/loss'? known: valid/" in said_at_step_3[0]
    assert [line.split("'")[3] for line in lines.having("no value of")] == ["valid/los", "test/top1", "other"]


def test_streams_that_nobody_evaluates_are_named(tmp_path: Path) -> None:
    (line,) = said(tmp_path / "run", streams={"val": numbers(3, 2)}).having("streams not evaluated")
    assert line.startswith("streams not evaluated while training: test, val; to evaluate one: ")
    assert not said(tmp_path / "all", services=[Evaluate("valid"), Evaluate("test")]).having("not evaluated")
    assert not said(tmp_path / "all").having("not evaluated")  # finished


def test_a_rollback_does_not_introduce_the_run_again(tmp_path: Path) -> None:
    class Spoilt(TinyTask):
        def train_step(self, batch: Any) -> Mapping[str, Any]:
            found = super().train_step(batch)
            return {"loss": math.nan} if len(self.seen) == 3 else found

    streams = {"train": numbers(20, 2)}
    lines = said(tmp_path, Spoilt(), services=[Recovery()], streams=streams, max_epoch=1)
    assert len(lines.having("Quarantined")) == 1
    assert len(lines.having("Execution Environment")) == len(lines.having("not evaluated")) == 1


def test_the_batch_in_which_a_metric_is_not_finite_is_named(tmp_path: Path) -> None:
    class Nan(TinyTask):
        def eval_step(self, batch: Any) -> Mapping[str, Any]:
            spoilt = 2 in batch[0]
            return {"acc": math.nan if spoilt else 1.0, "ok": 1.0, "left": math.nan, "size": math.inf}

    services = [Evaluate("valid", stats={"left": ["nanmean"]})]
    lines = said(tmp_path, Nan(), services=services, max_epoch=1)
    assert lines.having("of the evaluation") == [
        "stream 'valid': 'size' is inf in batch 1, 'acc' is nan in batch 2 of the evaluation"
    ]


# -------------------- trainer moments


Trace = list[tuple[str, int, int]]


def test_the_trace_of_two_epochs_of_two_steps(tmp_path: Path) -> None:
    trace: Trace = []
    evaluate = everstep.Evaluate("valid", validate_first=True)
    streams = {"train": numbers(4, 2), "valid": numbers(3, 2)}
    door = trainer(tmp_path / "run", streams=streams, services=[evaluate])
    with door.open() as loop:
        for moment in (m for m in Moment if m not in (Moment.AFTER_CHECKPOINT, Moment.ENTER_LOOP)):
            loop.on(moment, lambda b: trace.append((b.moment.value, b.epoch, b.step)))
        for _ in loop.iter_epochs():
            door.epoch()

    def epoch(number: int, step: int) -> Trace:
        steps = [
            [("before_step", number, s - 1), ("metrics_collected", number, s - 1), ("after_step", number, s)]
            for s in (step + 1, step + 2)
        ]
        return [("before_epoch", number, step), *itertools.chain(*steps)]

    def evaluation(number: int, step: int) -> Trace:
        return [("after_eval_step", number, step)] * 2 + [("after_evaluation", number, step)]

    def line(number: int, step: int) -> Trace:
        return [("metric_stats_printed", number, step), ("time_metric_stats_printed", number, step)]

    first, *rest = epoch(1, 0)
    assert trace == [
        *evaluation(1, 0),
        *line(1, 0),
        first,
        *rest,
        *evaluation(1, 2),
        *line(1, 2),
        ("after_epoch", 1, 2),
        *epoch(2, 2),
        *evaluation(2, 4),
        *line(2, 4),
        ("after_epoch", 2, 4),
        ("exit_loop", 2, 4),
    ]


def test_observers_of_an_evaluation_only_look(tmp_path: Path) -> None:
    door = trainer(tmp_path / "run", max_epoch=1)

    def program() -> None:
        with door.open() as loop:
            loop.on(Moment.AFTER_EVAL_STEP, lambda b: everstep.Outcome(actions=(everstep.Stop("me too"),)))
            for _ in loop.iter_epochs():
                door.epoch()

    with pytest.raises(UsageError, match="observer"):
        program()
