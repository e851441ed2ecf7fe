"""A Trainer and its streams: passes and epochs, evaluation beside training, errors, the profile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_task import Own, TinyTask, numbers, trainer
from torch.utils.data import DataLoader, TensorDataset

import everstep
from everstep.data import checked, prefetch
from everstep.errors import ConfigError, DataError, MetricError, UsageError
from everstep.proof.compare import compare_runs
from everstep.services import Throughput
from everstep.testing import ManualClock
from tiny_runs import rows

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
def test_an_epoch_of_three_over_five_batches_stopped_after_every_step(tmp_path: Path) -> None:
    def start(name: str, *limits: int) -> list[int]:
        seen: list[tuple[int, ...]] = []
        for limit in limits:
            task = TinyTask()
            streams = {"train": numbers(5, 1)}
            trainer(tmp_path / name, task, streams=streams, steps_per_epoch=3, max_epoch=3).train(limit)
            seen += task.seen
        return [i for (i,) in seen]

    assert start("straight", 9) == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    for limit in range(1, 9):
        start(str(limit), limit, 9)
        assert compare_runs(tmp_path / "straight", tmp_path / str(limit)) == [], limit


@pytest.mark.campaign("long")
def test_several_train_streams_each_go_on_in_their_own_pass(tmp_path: Path) -> None:
    def start(name: str, *limits: int) -> list[tuple[int, ...]]:
        for limit in limits:
            task = TinyTask()
            streams = {"train": numbers(5, 1), "extra": numbers(4, 2)}
            door = trainer(tmp_path / name, task, streams=streams, steps_per_epoch=3, max_epoch=2)
            with door.open(max_step=limit) as loop:
                for _ in loop.iter_epochs():
                    door.epoch(["train", "extra"])
        return task.seen

    a, b = (0, 1), (2, 3)
    assert start("straight", 12) == [(0,), (1,), (2,), a, b, a, (3,), (4,), (0,), b, a, b]
    for limit in (1, 3, 5, 8):
        start(str(limit), limit, 12)
        assert compare_runs(tmp_path / "straight", tmp_path / str(limit)) == [], limit


def test_data_without_a_name_goes_on_in_its_pass_too(tmp_path: Path) -> None:
    task, data = TinyTask(), loader()
    door = trainer(tmp_path / "run", task, steps_per_epoch=3, streams={"train": [1]})
    with door.open() as loop:
        for _ in loop.iter_epochs():
            door.epoch([data])
    assert sorted(i for ids in task.seen[:4] for i in ids) == list(range(8))
    assert not loop.ending.warnings


def test_the_same_stream_twice_in_an_epoch_is_no_other_data(tmp_path: Path) -> None:
    task = Pairs()
    door = trainer(tmp_path / "run", task, max_epoch=1)
    with door.open() as loop:
        for _ in loop.iter_epochs():
            door.epoch()
            door.epoch()
    assert len(task.seen) == 4 and not loop.ending.warnings


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
    class Values(TinyTask):
        def eval_step(self, batch: Any) -> Mapping[str, Any]:
            return {"x": float(batch[0].mean())}

    def start(name: str, *limits: int) -> list[str]:
        for limit in limits:
            streams = {"valid": Own(), "test": ones(5)}
            services = [everstep.Evaluate("valid", num_steps=3), everstep.Evaluate("test")]
            trainer(tmp_path / name, Values(), streams=streams, services=services, max_epoch=3).train(limit)
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


SHARED: dict[str, Callable[[], Any]] = {
    "own place": Own,
    "generator": lambda: ones(5),
    "workers that persist": lambda: loader(num_workers=1, persistent_workers=True),
}


@pytest.mark.parametrize("kind", SHARED)
def test_what_keeps_its_own_place_is_not_trained_on_and_evaluated_at_once(tmp_path: Path, kind: str) -> None:
    data = SHARED[kind]()
    message = "keeps its own place in the data and would lose it; give a second one"
    for evaluated in (data, checked(data)):
        with pytest.raises(ConfigError, match=message):
            trainer(tmp_path / "named", streams={"train": data, "valid": evaluated})


def evaluated_first(door: everstep.Trainer, data: Any) -> None:
    door.evaluate("extra", 1)
    door.epoch([data])


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(
    "use",
    [
        lambda door, data: door.epoch(["extra"], [data]),
        lambda door, data: door.epoch([data], ["extra"]),
        lambda door, data: [door.epoch("extra"), next(door.predict(data))],
        evaluated_first,
    ],
)
@pytest.mark.parametrize("kind", ["own place", "generator"])
def test_nor_in_a_program_of_ones_own(tmp_path: Path, kind: str, use: Callable[..., Any]) -> None:
    data = SHARED[kind]()
    door = trainer(tmp_path / "run", streams={"extra": data})

    def program() -> None:
        with door.open() as loop:
            for _ in loop.iter_epochs():
                use(door, data)

    with pytest.raises(ConfigError, match="keeps its own place in the data and would lose it"):
        program()


# ------------------------------------------------------------------------------------- prefetching


@pytest.mark.parametrize("task", [TinyTask, Pairs])
def test_an_error_of_the_producer_comes_as_itself_where_it_belongs(
    tmp_path: Path, task: type[TinyTask]
) -> None:
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


def test_training_and_evaluating_ahead_are_the_same_run(tmp_path: Path) -> None:
    def start(name: str, around: Callable[[Any], Any], *limits: int) -> bytes:
        for limit in limits:
            task = Pairs()
            streams = {"train": around(numbers(8, 1, shuffle=True)), "valid": around(numbers(5, 2))}
            services = [everstep.Evaluate("valid", everstep.Every(steps=3))]
            trainer(tmp_path / name, task, streams=streams, services=services).train(limit)
        assert not prefetching()
        return task.w.tobytes()

    plain = start("plain", lambda data: data, 8)
    assert start("ahead", lambda data: prefetch(data, buffer=3), 3, 6, 8) == plain
    assert compare_runs(tmp_path / "plain", tmp_path / "ahead") == []


# ---------------------------------------------------------------------------------------- profile


def test_the_parts_of_the_time(tmp_path: Path) -> None:
    clock = ManualClock()

    def slow(batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            clock.advance(2.0)
            yield batch

    class Slow(TinyTask):
        def train_step(self, batch: Any) -> Mapping[str, Any]:
            clock.advance(3.0)
            return super().train_step(batch)

        def eval_step(self, batch: Any) -> Mapping[str, Any]:
            clock.advance(5.0)
            return super().eval_step(batch)

    class Reporting(everstep.Service):
        def run(self, boundary: everstep.Boundary) -> None:
            clock.advance(7.0)

        def finish(self, boundary: everstep.Boundary) -> None:
            clock.advance(7.0)

    lines: list[str] = []
    services = [
        everstep.Evaluate(validate_first=True),
        Reporting("slow", everstep.Every(steps=2)),
        Throughput(2, every=everstep.Every(epochs=1)),
    ]
    streams = {"train": slow(ones(4)), "valid": [(np.ones(2),)]}
    door = trainer(
        tmp_path / "run", Slow(), streams=streams, services=services, max_epoch=1, clock=clock, lines=lines
    )
    door.run_training()
    (epoch,) = [line.partition("] ")[2] for line in lines if "steps/s" in line]
    shares = "data 18%, evaluation 23%, services 32%, step 27%"
    assert epoch == f"0.09091 steps/s, 0.1818 samples/s: {shares}"
    (whole,) = [line for line in lines if line.startswith("time of this start")]
    parts = "data 8 s (16%), evaluation 10 s (20%), services 21 s (41%), step 12 s (24%)"
    assert whole == f"time of this start: {parts}"


# ------------------------------------------------------------------------------------- smoke test


def python_state() -> tuple[Any, ...]:
    return np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()  # type: ignore[index]


SMOKED: dict[str, Callable[[], Any]] = {
    **TRAINED_ON,
    "own place": Own,
    "generator": lambda: ones(8),
    "prefetched generator": lambda: prefetch(ones(8)),
}


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("kind", SMOKED)
def test_a_smoke_test_leaves_everything_where_it_was(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("EVERSTEP_ROOT", str(tmp_path / "root"))

    def start(name: str, smoke: bool) -> TinyTask:
        task, data = TinyTask(), SMOKED[kind]()
        torch.manual_seed(1)
        streams = {"train": data, "valid": SMOKED[kind]()}
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


def test_a_smoke_test_ends_workers_that_persist_and_is_no_part_of_a_loop(tmp_path: Path) -> None:
    door = trainer(tmp_path / "run", streams={"valid": loader(num_workers=1, persistent_workers=True)})
    before = torch.multiprocessing.active_children()
    door.smoke_test()
    assert torch.multiprocessing.active_children() == before

    def program() -> None:
        with door.open():
            door.smoke_test()

    with pytest.raises(UsageError, match="call it before"):
        program()


# ------------------------------------------------------------------------------------- bad input


def test_streams_are_names_to_data_and_names_are_known(tmp_path: Path) -> None:
    door = trainer(tmp_path / "run", streams={"train2": numbers(4, 2)})

    def program() -> None:
        with door.open() as loop:
            for _ in loop.iter_epochs():
                door.epoch(["train", [(np.ones(1),)], "train2"])

    with pytest.raises(ConfigError, match="two streams are called 'train2'; give names to data"):
        program()
    with door.open() as loop:
        for _ in loop.iter_epochs():
            with pytest.raises(ConfigError, match="the streams of an epoch are a DataLoader; give a list"):
                door.epoch(loader())
            with pytest.raises(ConfigError, match="stream name 'valid/more': give a string without"):
                door.epoch({}, {"valid/more": numbers(4, 2)})
            break


def test_streams_that_may_be_empty(tmp_path: Path) -> None:
    empty = checked([], empty_stream="ignore")
    streams = {"extra": empty, "valid": empty}
    door = trainer(tmp_path / "run", streams=streams)
    with door.open() as loop:
        for _ in loop.iter_epochs():
            door.epoch(["train", "extra"])
    assert loop.ending.step == 8 and not rows(tmp_path / "run", "eval/valid")
    for limit in ({"max_epoch": None, "max_step": 3}, {"steps_per_epoch": 2}):
        with pytest.raises(DataError, match="gave no batch in a whole pass"):
            trainer(tmp_path / "endless", streams={"train": empty}, **limit).run_training()


def test_a_bad_batch_loses_nothing(tmp_path: Path) -> None:
    good = [(np.ones(2), np.ones(2))] * 3
    bad = [*good, (np.ones(2), np.ones(3))]

    class First(TinyTask):
        def train_step(self, batch: Any) -> Mapping[str, Any]:
            return super().train_step(batch[:1])

    services = [everstep.Checkpoints(everstep.Every(steps=2))]
    for name, batches in (("run", bad), ("straight", [*good, good[0]])):
        door = trainer(tmp_path / name, First(), streams={"train": checked(batches)}, services=services)
        if name == "run":
            with pytest.raises(
                DataError, match=r"stream 'train', pass 1, batch 4: .*'0': 2, '1': 3.*make them"
            ):
                door.run_training()
            door = trainer(tmp_path / name, First(), streams={"train": [*good, good[0]]}, services=services)
        door.run_training()
    assert compare_runs(tmp_path / "run", tmp_path / "straight") == []


def test_a_metric_of_an_evaluation_is_nobody_elses(tmp_path: Path) -> None:
    class Claiming(TinyTask):
        def train_step(self, batch: Any) -> Mapping[str, Any]:
            return {**super().train_step(batch), "valid/loss": 0.0}

    message = "'valid/loss' is written at step 4 by the program and by service 'valid'; give one of the two"
    with pytest.raises(MetricError, match=message):
        trainer(tmp_path / "step", Claiming()).run_training()

    def program(door: everstep.Trainer, resumed: bool = False) -> None:
        with door.open() as loop:
            for _ in loop.iter_epochs():
                door.epoch([], ["valid"])
                door.epoch("train")
                if not resumed:
                    loop.collect_metrics({"test/loss": 1.0})

    services = [everstep.Evaluate("test"), everstep.Checkpoints(EACH_STEP)]
    with pytest.raises(MetricError, match="'test/loss'"):
        program(trainer(tmp_path / "tail", services=services))
    program(trainer(tmp_path / "tail", services=services), resumed=True)
