"""The third door: it trains, evaluates and resumes as the program that anyone could have written."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import everstep
from everstep import Best, EarlyStop, Evaluate, Every, Outcome, Service
from everstep.data import checked, prefetch
from everstep.errors import ConfigError, DataError, MetricError, UsageError
from everstep.metrics import MetricFormatter
from everstep.proof.compare import compare_runs
from everstep.record import RunJournal
from everstep.services import Recovery, Stage, StopAfter, Throughput
from everstep.testing import ManualClock
from tiny_runs import Boom, Tiny, Told, rows
from tiny_task import Notes, Own, TinyTask, calling, in_epochs, numbers, slow, slow_data, trainer


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

    def look() -> None:
        frames[:] = [f.function for f in inspect.stack() if "/everstep/" in f.filename]

    trainer(tmp_path / "run", calling(look)).run_training()
    assert frames == ["_epoch", "run_training"]


def test_every_stream_has_its_own_metrics(tmp_path: Path) -> None:
    services = [everstep.Evaluate(name) for name in ("valid", "test")]
    trainer(tmp_path / "run", services=services).run_training()
    trainer(tmp_path / "test only", services=[everstep.Evaluate("test")], max_epoch=1).run_training()
    assert not rows(tmp_path / "test only", "eval/valid")
    for name in ("valid", "test"):
        found = [(row[0], row[1], row[3]) for row in rows(tmp_path / "run", f"eval/{name}")]
        loss, noise = f"{name}/loss", f"{name}/noise"
        assert found == [(1, 4, loss), (1, 4, noise), (2, 8, loss), (2, 8, noise)]


def test_evaluation_every_seconds_fires_when_they_are_over(tmp_path: Path) -> None:
    clock = ManualClock()
    every_step = everstep.Checkpoints(everstep.Every(steps=1))  # the loop asks the schedule at each step
    services = [everstep.Evaluate("valid", everstep.Every(seconds=2.5)), every_step]
    for limit in (4, 12):
        task = slow(clock, step=1.0)
        trainer(tmp_path / "run", task, services=services, max_epoch=3, clock=clock).train(limit)
    assert RunJournal(tmp_path / "run").series("valid/loss")[0] == [3, 7, 10]


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
    message = r"stream 'valid': 'loss' is both a log .* give one of them another name"
    with pytest.raises(UsageError, match=message):
        door.evaluate("valid")


def test_predictions_come_batch_by_batch(tmp_path: Path) -> None:
    door = trainer(tmp_path / "run")
    door.train(1)
    w = door.task.w[0]  # type: ignore[attr-defined]
    assert [list(p) for p in door.predict("test")] == [[0.0, w], [2 * w]]
    assert [list(p) for p in door.predict([(np.array([1.0]),)])] == [[w]]


def test_an_epoch_of_your_own(tmp_path: Path) -> None:
    task, ended = TinyTask(), Notes()
    task.train_loop_end = lambda: ended.append(1)  # type: ignore[method-assign]
    door = trainer(tmp_path / "run", task, streams={"extra": numbers(4, 2)})
    seen = list[dict[str, float]]()
    all_streams = lambda: door.epoch(["train", "extra"], ["valid", [(np.array([9]),)]])  # noqa: E731
    in_epochs(door, lambda loop: (all_streams(), seen.append(door.evaluate_all())))
    names = {row[3] for row in rows(tmp_path / "run", "step")}
    assert names == {"loss", "extra/loss"} and len(ended) == len(seen) == 2
    assert seen[0].keys() == {"valid/loss", "valid/noise"}
    tail = {row[3] for row in rows(tmp_path / "run", "tail")}
    assert tail == {"valid/loss", "valid/noise", "valid2/loss", "valid2/noise"}


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


def test_the_line_of_an_epoch_has_its_evaluation_and_is_as_the_options_say(tmp_path: Path) -> None:
    class Short(MetricFormatter):
        def format(self, name: str, stats: Any, is_best: bool) -> str:
            return f"<{name}>"

        def sort(self, names: Any) -> list[str]:
            return sorted(name for name in names if not name.endswith("time"))

    lines: list[str] = []
    options = {"show_eta": False, "formatter": Short(), "lines": lines}
    trainer(tmp_path / "short", max_epoch=1, **options).run_training()
    (line,) = (line for line in lines if line.startswith("[Step 4]"))
    assert line == "[Step 4] <loss>; <valid/loss>; <valid/noise>"
    lines.clear()
    services = [everstep.EarlyStop("valid/loss", patience=9), everstep.Evaluate(validate_first=True)]
    trainer(tmp_path / "run", lines=lines, services=services).run_training()
    found = [line for line in lines if line.startswith("[Epoch")]
    tags = [line.partition("]")[0] for line in found]
    assert tags == ["[Epoch 1/2, Step 0", "[Epoch 1/2, Step 4", "[Epoch 2/2, Step 8"]
    assert not any("±" in line.partition("valid/loss")[2].partition(";")[0] for line in found)
    assert "valid/loss" in found[0] and "(*)" in found[0] and "] loss:" not in found[0]
    assert all("valid/eval time: " in line for line in found)


def test_the_eta_counts_evaluation_apart(tmp_path: Path) -> None:
    clock, etas = ManualClock(), []
    door = trainer(tmp_path / "run", slow(clock, 1.0, 100.0), max_epoch=4, clock=clock)
    in_epochs(door, lambda loop: (etas.append(loop.get_eta()), door.epoch()))
    assert etas[2] == 8 * 1.0 + 2 * 300.0
    times = [row.value for row in RunJournal(tmp_path / "run").rows() if row.name == "valid/eval_time"]
    assert times == [300.0] * 4


# -------------------- one writer
def inside(door: everstep.Trainer) -> None:
    in_epochs(door, lambda loop: door.epoch("train", "valid"))


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


def test_two_services_that_write_one_name_at_one_step(tmp_path: Path) -> None:
    def services(other: int) -> list[Service]:
        norm = Outcome({"norm": 1.0})
        steps = {"a": 2, "b": other}
        return [Told(name, lambda b: norm, Stage.MEASURE, Every(steps=n)) for name, n in steps.items()]

    message = "'norm' is written at step 6 by service 'a' and by service 'b'"
    for _ in range(2):  # a resume knows who wrote
        with pytest.raises(MetricError, match=message):
            Tiny(tmp_path / "run", max_epoch=2, services=services(3)).train()
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


# -------------------- what is said
class Lines(list[str]):
    def having(self, part: str) -> list[str]:
        return [line for line in self if part in line]


def said(run_dir: Path, task: everstep.Task | None = None, **arguments: Any) -> Lines:
    trainer(run_dir, task, lines=(lines := Lines()), **arguments).run_training()
    return lines


def test_a_training_without_an_end_says_so(tmp_path: Path) -> None:
    def end() -> None:
        raise KeyboardInterrupt  # nothing else ends the run

    lines = Lines()
    endless = trainer(tmp_path / "run", calling(end), lines=lines, max_epoch=None, services=[Recovery()])
    with pytest.raises(KeyboardInterrupt):
        endless.run_training()
    (line,) = lines.having("no limit")
    assert "give max_epoch=, max_step= or max_time=" in line
    limits: list[Any] = [{"max_step": 2}, {"max_time": 1000.0, "max_step": 2}]
    limits += [{"services": [StopAfter(epochs=1)]}, {"services": [EarlyStop("loss", threshold=1e9)]}]
    for number, given in enumerate(limits):
        assert not said(tmp_path / str(number), **{"max_epoch": None, **given}).having("no limit")


def test_a_metric_that_an_evaluation_did_not_find_is_said_at_once(tmp_path: Path) -> None:
    def look() -> None:
        if len(task.seen) == 3:
            said_at_step_3.extend(lines.having("no value of"))

    task, said_at_step_3 = calling(look), list[str]()
    lines = Lines()
    watching = [EarlyStop("valid/los", "min", patience=9), Best("valid/loss")]
    watching += [Best("test/top1", "max"), Best("other", "max")]
    services = [*watching, Evaluate("valid", Every(steps=2)), Evaluate("test", Every(epochs=2))]
    trainer(tmp_path, task, lines=lines, max_epoch=2, services=services).run_training()
    assert len(said_at_step_3) == 1
    assert "no value of 'valid/los'; did you mean 'valid/loss'? known: valid/" in said_at_step_3[0]
    assert [line.split("'")[3] for line in lines.having("no value of")] == ["valid/los", "test/top1", "other"]


def test_streams_that_nobody_evaluates_are_named(tmp_path: Path) -> None:
    (line,) = said(tmp_path / "run", streams={"val": numbers(3, 2)}).having("streams not evaluated")
    assert line.startswith("streams not evaluated while training: test, val; to evaluate one: ")
    assert not said(tmp_path / "all", services=[Evaluate("valid"), Evaluate("test")]).having("not evaluated")
    assert not said(tmp_path / "all").having("not evaluated")  # finished


def test_the_batch_in_which_a_metric_is_not_finite_is_named(tmp_path: Path) -> None:
    task, other = TinyTask(), {"ok": 1.0, "left": math.nan, "size": math.inf}
    task.eval_step = lambda batch: {"acc": math.nan if 2 in batch[0] else 1.0, **other}  # type: ignore[method-assign]
    services = [Evaluate("valid", stats={"left": ["nanmean"]})]
    lines = said(tmp_path, task, services=services, max_epoch=1)
    (line,) = lines.having("of the evaluation")
    assert line == "stream 'valid': 'size' is inf in batch 1, 'acc' is nan in batch 2 of the evaluation"


EACH_STEP = everstep.Every(steps=1)


class Pairs(TinyTask):
    """Trains on two batches at a time."""

    def next_train_inputs(self, batches: Iterator[Any]) -> Any:
        return (np.concatenate([next(batches)[0], next(batches)[0]]),)


def loader(**options: Any) -> Any:
    data = TensorDataset(torch.arange(8.0))
    return DataLoader(data, batch_size=2, shuffle=True, collate_fn=collate, **options)


def collate(samples: list[Any]) -> tuple[Any]:
    return (np.array([float(x) for (x,) in samples]),)


def ones(count: int) -> Iterator[Any]:
    return ((np.array([float(i)]),) for i in range(count))


def prefetching() -> list[str]:
    """Without the thread of the index: the end of a run waits for it a moment only, by design."""
    names = {thread.name for thread in threading.enumerate()} - {"everstep-index"}
    return [name for name in names if "everstep" in name]


# ------------------------------------------------------------------------------ passes and epochs
@pytest.mark.campaign("long")
def test_several_train_streams_each_go_on_in_their_own_pass(tmp_path: Path) -> None:
    def start(name: str, *limits: int) -> list[tuple[int, ...]]:
        for limit in limits:
            task = TinyTask()
            streams = {"train": numbers(5, 1), "extra": numbers(4, 2)}
            door = trainer(tmp_path / name, task, streams=streams, steps_per_epoch=3, max_epoch=2)
            in_epochs(door, lambda loop: door.epoch(["train", "extra"]), max_step=limit)  # noqa: B023
        return task.seen

    a, b = (0, 1), (2, 3)
    assert start("straight", 12) == [(0,), (1,), (2,), a, b, a, (3,), (4,), (0,), b, a, b]
    for limit in (1, 3, 5, 8):
        start(str(limit), limit, 12)
        assert compare_runs(tmp_path / "straight", tmp_path / str(limit)) == [], limit


def test_data_without_a_name_goes_on_in_its_pass_and_a_stream_twice_is_no_other_data(tmp_path: Path) -> None:
    task, data = TinyTask(), loader()
    door = trainer(tmp_path / "run", task, steps_per_epoch=3, streams={"train": [1]})
    loop = in_epochs(door, lambda loop: door.epoch([data]))
    assert sorted(i for ids in task.seen[:4] for i in ids) == list(range(8))
    assert not loop.ending.warnings
    twice = trainer(tmp_path / "twice", pairs := Pairs(), max_epoch=1)
    loop = in_epochs(twice, lambda loop: (twice.epoch(), twice.epoch()))
    assert len(pairs.seen) == 4 and not loop.ending.warnings


# ------------------------------------------------------------------------ evaluating beside training
TRAINED_ON: dict[str, Callable[[], Any]] = {
    "arrays": lambda: numbers(8, 2, shuffle=True),
    "prefetched": lambda: prefetch(checked(numbers(8, 2, shuffle=True))),
    "loader": loader,
    "loader with a generator": lambda: loader(generator=torch.Generator().manual_seed(3)),
    "loader with workers": lambda: loader(num_workers=1),
}


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("kind", TRAINED_ON)
def test_evaluating_on_the_data_in_training_restarts_nothing(tmp_path: Path, kind: str) -> None:
    def start(name: str, *services: everstep.Service) -> TinyTask:
        task, data = TinyTask(), TRAINED_ON[kind]()
        streams = {"train": data, "same": data}
        trainer(tmp_path / name, task, streams=streams, services=services).run_training()
        return task

    never = start("never", everstep.Evaluate("test", everstep.Never()))
    often = start("often", everstep.Evaluate("train", EACH_STEP), everstep.Evaluate("same", EACH_STEP))
    assert often.seen == never.seen and often.w.tobytes() == never.w.tobytes()
    found = [row[5] for row in rows(tmp_path / "often", "eval/train") if row[3] == "train/loss"]
    assert len(found) == 8


def test_data_with_a_place_of_its_own_is_evaluated_from_its_start_each_time(tmp_path: Path) -> None:
    def start(name: str, *limits: int) -> list[str]:
        for limit in limits:
            task = TinyTask()
            task.eval_step = lambda batch: {"x": float(batch[0].mean())}  # type: ignore[method-assign]
            streams = {"valid": Own(), "test": ones(5)}
            services = [everstep.Evaluate("valid", num_steps=3), everstep.Evaluate("test")]
            trainer(tmp_path / name, task, streams=streams, services=services, max_epoch=3).train(limit)
        return [str(row[5]) for row in rows(tmp_path / name) if row[2].startswith("eval/")]

    assert start("run", 5, 12) == start("straight", 12) == [(2.0).hex(), (4.0).hex()] * 3


def test_an_iterator_that_failed_in_an_evaluation_is_not_taken_for_a_shorter_one(tmp_path: Path) -> None:
    def breaking() -> Iterator[Any]:
        yield from ones(2)
        raise OSError("no disk")

    door = trainer(tmp_path / "run", streams={"valid": breaking()})
    with pytest.raises(OSError, match="no disk"):
        door.run_training()
    with pytest.raises(DataError, match="exhausted"):
        door.evaluate("valid")


# ------------------------------------------------------------------------------------- prefetching
@pytest.mark.parametrize("task", [TinyTask, Pairs])
def test_an_error_of_the_producer_comes_as_itself_where_it_belongs(tmp_path: Path, task: Any) -> None:
    def reading_the_disk() -> Iterator[Any]:
        yield from ones(4)
        raise OSError(5, "the disk is gone")

    tiny = task()
    door = trainer(tmp_path / "run", tiny, streams={"train": prefetch(reading_the_disk(), buffer=9)})
    with pytest.raises(OSError, match="the disk is gone") as raised:
        door.run_training()
    assert raised.type is OSError and raised.value.errno == 5
    assert raised.traceback[-1].name == "reading_the_disk"
    assert len([row for row in rows(tmp_path / "run", "step") if row[3] == "loss"]) == len(tiny.seen)
    assert [i for ids in tiny.seen for i in ids] == [0, 1, 2, 3]
    assert not prefetching()


# ---------------------------------------------------------------------------------------- profile
def test_the_parts_of_the_time(tmp_path: Path) -> None:
    clock = ManualClock()

    class Reporting(everstep.Service):
        def run(self, boundary: everstep.Boundary) -> None:
            clock.advance(7.0)

        def finish(self, boundary: everstep.Boundary) -> None:
            clock.advance(7.0)

    lines: list[str] = []
    services = [Evaluate(validate_first=True), Reporting("slow", Every(steps=2))]
    services += [Throughput(2, every=Every(epochs=1))]
    streams = {"train": slow_data(clock, 2.0, [*ones(4)]), "valid": [(np.ones(2),)]}
    options: dict[str, Any] = {"services": services, "max_epoch": 1, "clock": clock, "lines": lines}
    trainer(tmp_path / "run", slow(clock, 3.0, 5.0), streams=streams, **options).run_training()
    (epoch,) = [line.partition("] ")[2] for line in lines if "steps/s" in line]
    shares = "data 18%, evaluation 23%, services 32%, step 27%"
    assert epoch == f"0.09091 steps/s, 0.1818 samples/s: {shares}"
    (whole,) = [line for line in lines if line.startswith("time of this start")]
    parts = "data 8 s (16%), evaluation 10 s (20%), services 21 s (41%), step 12 s (24%)"
    assert whole == f"time of this start: {parts}"


# ------------------------------------------------------------------------------------- smoke test
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


SMOKED: dict[str, Callable[[], Any]] = {
    **TRAINED_ON,
    "own place": Own,
    "generator": lambda: ones(8),
    "prefetched generator": lambda: prefetch(ones(8)),
}


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("kind", SMOKED)
def test_a_smoke_test_leaves_all_as_it_was(tmp_path: Path, kind: str, monkeypatch: Any, capfd: Any) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("EVERSTEP_ROOT", str(tmp_path / "root"))

    def python_state() -> tuple[Any, ...]:
        return np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()  # type: ignore[index]

    def start(name: str, smoke: bool) -> TinyTask:
        task, data = TinyTask(), SMOKED[kind]()
        torch.manual_seed(1)
        streams = {"train": data, "valid": SMOKED[kind]()}
        if kind == "loader with workers":
            streams["valid"] = loader(num_workers=1, persistent_workers=True)
        door = trainer(tmp_path / name, task, streams=streams, max_epoch=1)
        if smoke:
            before, workers = python_state(), torch.multiprocessing.active_children()
            door.smoke_test()
            door.smoke_test()
            assert python_state() == before and len(task.seen) == 2
            task.seen.clear()
            assert not list((tmp_path / "tmp").iterdir()) and not list(tmp_path.rglob("everstep-smoke*"))
            assert not prefetching() and torch.multiprocessing.active_children() == workers
            assert capfd.readouterr() == ("", "")
        door.run_training()
        return task

    smoked, straight = start("smoked", True), start("straight", False)
    assert smoked.seen == straight.seen and len(straight.seen) > 3
    moved = [next((tmp_path / "root").rglob(name)) for name in ("smoked", "straight")]
    assert compare_runs(*moved) == []


# ----------------------------------------------------------------- bad input: see test_misuse.py
def test_streams_that_may_be_empty(tmp_path: Path) -> None:
    empty = checked([], empty_stream="ignore")
    streams = {"extra": empty, "valid": empty}
    door = trainer(tmp_path / "run", streams=streams)
    loop = in_epochs(door, lambda loop: door.epoch(["train", "extra"]))
    assert loop.ending.step == 8 and not rows(tmp_path / "run", "eval/valid")
    for limit in ({"max_epoch": None, "max_step": 3}, {"steps_per_epoch": 2}):
        with pytest.raises(DataError, match="gave no batch in a whole pass"):
            trainer(tmp_path / "endless", streams={"train": empty}, **limit).run_training()


def test_a_metric_of_an_evaluation_is_nobody_elses(tmp_path: Path) -> None:
    class Claiming(TinyTask):
        def train_step(self, batch: Any) -> Mapping[str, Any]:
            return {**super().train_step(batch), "valid/loss": 0.0}

    message = "'valid/loss' is written at step 4 by the program and by service 'valid'; give one of the two"
    with pytest.raises(MetricError, match=message):
        trainer(tmp_path / "step", Claiming()).run_training()

    def program(claims: dict[str, float]) -> None:
        services = [everstep.Evaluate("test"), everstep.Checkpoints(EACH_STEP)]
        door = trainer(tmp_path / "tail", services=services)
        epoch = lambda loop: (door.epoch([], ["valid"]), door.epoch("train"), loop.collect_metrics(claims))  # noqa: E731
        in_epochs(door, epoch)

    with pytest.raises(MetricError, match="'test/loss'"):
        program({"test/loss": 1.0})
    program({})
