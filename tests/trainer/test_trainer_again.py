"""Trainers that go on in one process, with the same objects, and several on one pass over the data."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import everstep
from counting import Counted
from everstep import Every
from everstep.errors import ConfigError, Interrupted, NonFiniteError
from everstep.proof.compare import compare_runs
from everstep.record import RunJournal
from everstep.services import Recovery
from everstep.testing import ManualClock
from everstep.trainer.multi_run import copy_batch
from gate import share
from tiny_runs import Boom
from tiny_task import Notes, Own, TinyTask, calling, numbers, slow, trainer

COUNT = 24
"""Samples: 6 batches a pass."""


class Noisy(Dataset[Any]):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[float]:
        return (index + 0.1 * self.rng.random(),)


def data(kind: str) -> Any:
    samples = TensorDataset(torch.arange(COUNT))
    if kind == "generator":
        return DataLoader(samples, 4, shuffle=True, generator=torch.Generator().manual_seed(5))
    if kind == "dataset's":
        return DataLoader(Noisy(), 4, shuffle=True)
    if kind == "own":
        return Own(6)
    if kind == "prefetched":
        return everstep.data.prefetch(Own(6))
    return DataLoader(samples, 4, shuffle=True, num_workers=1)


KINDS = ("generator", "dataset's", "own", "prefetched", "workers")


class Scheduled(everstep.torch.Task):
    """A learning rate that falls, dropout, and a sample that spoils each batch it is in, from a step on."""

    def __init__(self, bad: int = -1, since: int = 0, width: int = 4) -> None:
        super().__init__()
        self.bad, self.since, self.width, self.count = bad, since, width, {"steps": 0}

    def build_model(self) -> Any:
        layers = torch.nn.Linear(1, self.width), torch.nn.Dropout(0.3), torch.nn.Linear(self.width, 1)
        return torch.nn.Sequential(*layers)

    def build_optimizer(self, model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.decay = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return optimizer

    def state(self) -> Mapping[str, Any]:
        return {**super().state(), "decay": self.decay, "count": self.count}

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        self.count["steps"] += 1
        x = torch.as_tensor(batch[0])[:, None].float() / COUNT
        loss = self.model(x).square().mean()
        if self.count["steps"] >= self.since and bool((torch.as_tensor(batch[0]).int() == self.bad).any()):
            loss = loss * float("nan")
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss}

    def train_loop_end(self) -> None:
        self.decay.step()


def make(run_dir: Path, kind: str, bad: int = -1, since: int = 0, every: int = 1000) -> everstep.Trainer:
    services = [Recovery(5), everstep.Checkpoints(Every(steps=every))]
    services += [everstep.services.Console(sink=lambda line: None)]
    task = Scheduled(bad, since)
    return everstep.Trainer(task, {"train": data(kind)}, run_dir, services=services, seed=1, max_epoch=3)


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("kind", KINDS)
def test_on_and_on_is_at_once(tmp_path: Path, kind: str) -> None:
    at_once = make(tmp_path / "at once", kind).train(16)
    several = make(tmp_path / "several", kind)
    for steps in (3, 6, 10, 12, 16):  # 6 and 12: where a pass ends
        ending = several.train(steps)
        assert ending.warnings == ()
    assert ending.digest == at_once.digest
    assert compare_runs(tmp_path / "at once", tmp_path / "several") == []


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("since", "every"), [(8, 4), (1, 1000)])  # from where it was saved, and from step 0
def test_rolled_back_objects_are_as_good_as_new(tmp_path: Path, kind: str, since: int, every: int) -> None:
    same = make(tmp_path / "same", kind, 3, since, every).run_training()

    def anew() -> everstep.supervisor.Ending:
        trainer = make(tmp_path / "new", kind, 3, since, every)
        with trainer.open() as loop:
            for _ in loop.iter_epochs():
                trainer.epoch()
        return loop.ending

    new = everstep.recovering(anew)
    assert same.rollbacks == new.rollbacks >= 1
    assert compare_runs(tmp_path / "new", tmp_path / "same") == []


def test_an_exception_before_the_first_save_then_again(tmp_path: Path) -> None:
    """Back at step 0, the generator of the loader stands where the program put it."""
    whole = make(tmp_path / "whole", "generator").run_training()
    broken = make(tmp_path / "broken", "generator")
    step, broken.task.train_step = broken.task.train_step, lambda batch: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        broken.run_training()
    broken.task.train_step = step  # type: ignore[method-assign]
    assert broken.run_training().digest == whole.digest


def test_resume_is_asked_for_until_something_is_saved(tmp_path: Path) -> None:
    for steps in (4, 8):
        trainer(tmp_path, max_epoch=3).train(steps)
    for where, resumed in ((4, "epoch-0001-step-00000004"), (False, None)):
        begun = trainer(tmp_path, max_epoch=3, resume=where)
        with pytest.raises(ZeroDivisionError), begun.open():
            raise ZeroDivisionError
        assert begun.train(8).resumed_from == resumed


def test_a_script_of_two_trainings_that_goes_back_continues_when_it_is_started_again(tmp_path: Path) -> None:
    for steps in (4, 8):
        trainer(tmp_path, max_epoch=3).train(steps)
    for began in "epoch-0001-step-00000004", "epoch-0003-step-00000012":
        script = trainer(tmp_path, max_epoch=3, resume=4)
        assert script.train(8).resumed_from == began
        script.train(12)


class Failing(TinyTask):
    """Its loss is NaN at one sample."""

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        return {**super().train_step(batch), "a_loss": float("nan") if 5 in batch[0] else 0.0}


def test_run_training_goes_on_by_itself(tmp_path: Path) -> None:
    lines: list[str] = []
    ending = trainer(tmp_path, Failing(), services=[Recovery()], lines=lines, resume=False).run_training()
    assert (ending.finished, ending.step, ending.rollbacks) == (True, 6, 2)
    said = {part: sum(part in line for line in lines) for part in ("Execution Environment", "not evaluated")}
    assert len([line for line in lines if line.startswith("rollback")]) == 2
    assert said == {"Execution Environment": 1, "not evaluated": 1}, "a rollback introduces the run again"
    assert all(6 not in one.batches[0].samples for one in RunJournal(tmp_path).rollbacks())  # type: ignore
    with pytest.raises(NonFiniteError):
        trainer(tmp_path / "bound", Failing(), services=[Recovery(1)]).run_training()


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("wrap", [iter, everstep.data.replay, everstep.data.prefetch, everstep.data.checked])
def test_a_failure_in_data_that_can_be_read_once_stands(tmp_path: Path, wrap: Any) -> None:
    batches = ((np.array([at, at + 1]),) for at in range(0, 8, 2))
    lines: list[str] = []
    options = {"services": [Recovery()], "streams": {"train": wrap(batches)}, "lines": lines}
    run = trainer(tmp_path, Failing(), max_epoch=1, **options)
    with pytest.raises(NonFiniteError, match="a_loss") as failed:
        run.run_training()
    reason = "step 3 is not undone: stream 'train' is an iterator, which cannot be read again; give a list"
    assert reason in failed.value.__notes__[-1]
    assert [line for line in lines if line.startswith(reason)]
    assert RunJournal(tmp_path).rollbacks() == []


def test_the_time_budget_counts_the_tries(tmp_path: Path) -> None:
    clock, streams = ManualClock(), {"train": numbers(8, 2)}
    task, services = slow(clock, step=10, kind=Failing), [Recovery()]
    run = trainer(tmp_path, task, services=services, clock=clock, max_time=65, streams=streams)
    with pytest.raises(Interrupted) as left:
        run.run_training()  # 3 steps, rollback, 1 step from the third on, and so on
    assert left.value.code == 3 and clock() <= 80


# -------------------- Ctrl-C and the time budget in an evaluation; crashes at any call: laws/test_zoo.py
def ctrl_c(at: int = 0) -> Any:
    """A task; Ctrl-C comes in the given batch of its evaluations, counted from 1."""
    evaluated = Notes()

    def strike() -> None:
        evaluated.append(1)
        if len(evaluated) == at:
            os.kill(os.getpid(), signal.SIGINT)

    task = calling(evaluation=strike)
    task.evaluated = evaluated
    return task


def evaluated_twice(run_dir: Path, at: int = 0) -> Any:
    """Two evaluations at each boundary, one before the first step, and services that decide after them."""
    every = Every(steps=3) | Every(epochs=1)
    services = [everstep.Evaluate("valid", every, validate_first=True), everstep.Evaluate("test", every)]
    services += [everstep.EarlyStop("valid/loss", patience=9), everstep.Best("test/loss", "min")]
    services += [everstep.Checkpoints(Every(epochs=2))]
    trainer(run_dir, task := ctrl_c(at), services=services, max_epoch=2).run_training()
    return task


@pytest.mark.campaign("long", gate="share")
def test_ctrl_c_leaves_an_evaluation_within_a_batch_and_loses_no_step(tmp_path: Path) -> None:
    batches = len(evaluated_twice(tmp_path / "straight").evaluated)
    assert batches > 20
    for at in share(range(1, batches + 1), 3):
        run_dir = tmp_path / str(at)
        with pytest.raises(SystemExit) as raised:
            evaluated_twice(run_dir, at)
        assert raised.value.code == 130
        again = len(evaluated_twice(run_dir).evaluated)
        assert again <= batches - at + 5, "evaluations that were over ran again"
        assert compare_runs(tmp_path / "straight", run_dir) == [], at
        assert not list((run_dir / "superseded").glob("*")), "the open checkpoint is still there"


def test_a_step_is_run_again_only_where_it_is_an_epochs_last(tmp_path: Path) -> None:
    def interrupted(at: int) -> list[int]:
        tasks = [ctrl_c(at), ctrl_c()]
        for task in tasks:
            services = [everstep.Evaluate("test", Every(steps=1)), everstep.Checkpoints(everstep.Never())]
            with suppress(SystemExit):
                trainer(tmp_path / str(at), task, services=services, max_epoch=1).run_training()
        assert len(tasks[0].evaluated) == at, "it went on in the evaluation"
        return [len(task.seen) for task in tasks]

    assert interrupted(1) == [1, 3]  # 4 steps, 2 batches of evaluation after each
    assert interrupted(6) == [3, 1]
    assert interrupted(7) == [4, 1]  # the state of one step before was saved: see docs/design.md


def test_an_epoch_cut_short_whose_evaluation_was_left_goes_on_under_a_raised_limit(tmp_path: Path) -> None:
    def train(name: str, max_step: int, at: int = 0) -> list[Any]:
        services = [everstep.Evaluate("test", Every(epochs=1))]
        trainer(tmp_path / name, task := ctrl_c(at), services=services, max_step=max_step).run_training()
        return task.seen  # type: ignore[no-any-return]

    train("straight", 6)  # half of the second epoch
    with pytest.raises(SystemExit):
        train("run", 6, at=3)
    assert train("run", 6) == []
    assert train("run", 9) == train("straight", 9)
    assert compare_runs(tmp_path / "straight", tmp_path / "run") == []


def test_the_time_budget_ends_an_evaluation(tmp_path: Path) -> None:
    clock = ManualClock()

    def train(name: str, **limit: float) -> Any:
        task = calling(evaluation=lambda: (clock.advance(10.0), task.trace.append("eval")))
        with suppress(SystemExit):
            task.trace.append(trainer(tmp_path / name, task, clock=clock, **limit).run_training().step)
        return task.trace, len(task.seen)

    train("straight")
    assert train("run", max_time=15.0) == (["eval"] * 2, 4)
    assert train("run", max_time=1000.0) == ([*["eval"] * 6, 8], 4)
    assert compare_runs(tmp_path / "straight", tmp_path / "run") == []
    facts = RunJournal(tmp_path / "run").events("interrupted", valid=False)
    assert [event.data["status"] for event in facts] == [3]


READS: list[int] = []


def shuffled(**arguments: Any) -> Any:
    return everstep.data.arrays(np.arange(8.0), batch_size=2, shuffle=True, **arguments)


def counted() -> Counted:
    """A stream that tells which batches were read."""
    return Counted(shuffled(), lambda batch: READS.append(int(batch[0][0])))


class Scaled(TinyTask):
    """Changes its batch in place; may act at a step of its own."""

    def __init__(self, scale: float = 1.0, act_at: int = 0, act: Callable[[], object] = Boom) -> None:
        super().__init__()
        self.scale, self.act_at, self.act = scale, act_at, act
        self.count = np.zeros(1)

    def state(self) -> Mapping[str, Any]:
        return {**super().state(), "count": self.count}

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        (ids,) = batch
        ids *= self.scale
        found = super().train_step(batch)
        self.count += 1
        if int(self.count[0]) == self.act_at and isinstance(happens := self.act(), BaseException):
            raise happens
        return found


SCALES = {"a": 1.0, "b": 2.0, "c": 0.5}
NAMES = tuple(SCALES)


def runs(folder: Path, tasks: Mapping[str, everstep.Task], data: Any = None) -> list[everstep.Trainer]:
    """A Trainer for each task, by the name of its run; their data is one object."""
    saves = everstep.Checkpoints(everstep.Every(steps=3), keep_last=None)
    options = {"streams": {"train": data or counted()}, "services": [saves], "max_epoch": 3}
    return [trainer(folder / name, task, **options) for name, task in tasks.items()]


def scaled(**acts: tuple[int, Callable[[], object]]) -> dict[str, everstep.Task]:
    return {name: Scaled(scale, *acts.get(name, ())) for name, scale in SCALES.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each run for itself."""
    folder = tmp_path_factory.mktemp("alone")
    for each in runs(folder, scaled()):
        each.run_training()
    return folder


def assert_same(folder: Path, alone: Path) -> None:
    for name in NAMES:
        assert compare_runs(folder / name, alone / name) == []


def test_each_is_the_run_that_it_would_be_alone_and_a_batch_is_read_once(tmp_path: Path, alone: Path) -> None:
    READS.clear()
    before = np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    endings = everstep.trainer.MultiRun(runs(tmp_path, scaled())).run_training()
    assert [ending.step for ending in endings] == [12, 12, 12]
    assert len(READS) == 12
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index, union-attr]
    assert_same(tmp_path, alone)


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("at", [1, 3, 4, 6, 12])
def test_one_that_fails_goes_on_behind_the_others(tmp_path: Path, alone: Path, at: int, capsys: Any) -> None:
    with pytest.raises(Boom) as raised:
        everstep.trainer.MultiRun(runs(tmp_path, scaled(b=(at, Boom)))).run_training()
    assert any(str(tmp_path / "b") in note for note in raised.value.__notes__)
    assert "b failed: Boom" in capsys.readouterr().out
    for name in ("a", "c"):
        assert compare_runs(tmp_path / name, alone / name) == []
    everstep.trainer.MultiRun(runs(tmp_path, scaled())).run_training()
    assert_same(tmp_path, alone)


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("at", [1, 7, 12])
def test_a_signal_saves_all_and_all_go_on(tmp_path: Path, alone: Path, at: int) -> None:
    interrupt = partial(os.kill, os.getpid(), signal.SIGTERM)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as raised:
        everstep.trainer.MultiRun(runs(tmp_path, scaled(b=(at, interrupt)))).run_training()
    assert raised.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    READS.clear()
    endings = everstep.trainer.MultiRun(runs(tmp_path, scaled())).run_training()
    assert all(ending.step == 12 for ending in endings)
    assert len(READS) <= 12 - at + 2
    assert_same(tmp_path, alone)


@pytest.mark.campaign("long")
def test_runs_that_stand_apart_come_together(tmp_path: Path, alone: Path) -> None:
    tasks = scaled()
    for steps, each in zip((3, 7), runs(tmp_path, {name: tasks[name] for name in "ab"}), strict=True):
        each.train(steps)
    READS.clear()
    everstep.trainer.MultiRun(runs(tmp_path, scaled())).run_training()
    assert len(READS) <= 12 + 4  # not 12 + 9 + 5: where they met, a batch was read twice
    assert_same(tmp_path, alone)


class Spoilt(Scaled):
    """Its loss is NaN at one sample."""

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        spoilt = 3 in batch[0]
        return {**super().train_step(batch), **({"loss": math.nan} if spoilt else {})}


class Augmented(Noisy):
    def __getitem__(self, index: int) -> tuple[float]:
        return (float(torch.randn(())) + index,)


def a_batch_left_out(folder: Path) -> list[everstep.Trainer]:
    batches = [(np.arange(2.0),), (np.zeros(0),)]
    data = everstep.data.checked(batches, empty_batch="ignore")
    return runs(folder, {name: Scaled() for name in NAMES}, data)


def limits_and_stops(folder: Path) -> list[everstep.Trainer]:
    data, stop = counted(), everstep.EarlyStop("valid/loss", patience=1)
    return [
        trainer(folder / "a", Scaled(), streams={"train": data}, max_epoch=2),
        trainer(folder / "b", Scaled(3.0), streams={"train": data}, max_epoch=6, services=[stop]),
        trainer(folder / "c", Scaled(0.1), streams={"train": data}, max_epoch=6, max_step=9),
    ]


def one_goes_back(folder: Path) -> list[everstep.Trainer]:
    data, saves = counted(), everstep.Checkpoints(everstep.Every(steps=3))
    return [
        trainer(folder / name, task, streams={"train": data}, max_epoch=3, services=[saves, *more])
        for name, task, *more in (("a", Scaled()), ("b", Spoilt(), Recovery(9)), ("c", Scaled(3.0)))
    ]


def dropout_and_augmented_samples(folder: Path) -> list[everstep.Trainer]:
    data = everstep.data.loader(Augmented(), batch_size=4, shuffle=True, num_workers=0)
    return [
        everstep.Trainer(Scheduled(width=width), {"train": data}, folder / name, seed=5, max_epoch=2)
        for name, width in (("a", 4), ("b", 6), ("c", 4))
    ]


TOGETHER = {a_batch_left_out: [3, 3, 3], limits_and_stops: [8, 8, 9], one_goes_back: [12, 9, 12]}
TOGETHER[dropout_and_augmented_samples] = [12, 12, 12]


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(("together", "steps"), TOGETHER.items())
def test_whatever_befalls_one_each_is_as_it_is_alone(tmp_path: Path, together: Any, steps: list[int]) -> None:
    for each in together(tmp_path / "alone"):
        each.run_training()
    endings = everstep.trainer.MultiRun(together(tmp_path / "together")).run_training()
    assert_same(tmp_path / "together", tmp_path / "alone")
    assert [ending.step for ending in endings] == steps


class Normed(everstep.torch.Task):
    """Its steps change buffers."""

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1))

    def build_optimizer(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def forward(self, batch: Any) -> Mapping[str, Any]:
        return {"loss": self.model(batch[0]).square().mean()}


def test_what_the_steps_of_another_run_change_is_saved_by_that_run(tmp_path: Path) -> None:
    data = everstep.data.arrays(torch.arange(12.0)[:, None], batch_size=2, seed=0)
    trainers = [everstep.Trainer(Normed(), {"train": data}, tmp_path / name, max_step=6) for name in NAMES]
    for ending in everstep.trainer.MultiRun(trainers).run_training():
        assert not any("the loop changes it" in warning for warning in ending.warnings)


def test_what_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    def several(data: Any, *seeds: int | None) -> list[everstep.Trainer]:
        return [
            everstep.Trainer(TinyTask(), {"train": data()}, tmp_path / str(number), seed=seed, max_step=3)
            for number, seed in enumerate(seeds)
        ]

    shared, own = shuffled(), shuffled(seed=0)
    loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=2, shuffle=True)
    wrapped, ready = everstep.data.as_stream(loader), everstep.data.as_stream([np.arange(4.0)] * 3)
    everstep.trainer.MultiRun(several(lambda: own, 1, 2, None))
    everstep.trainer.MultiRun(several(lambda: ready, 1, 1))
    wrong: list[tuple[list[Any], str]] = [
        (several(lambda: shared, 1, 2), r"runs have the seeds \[1, 2\]; give all Trainers one seed"),
        (several(lambda: shared, None, None), "give all Trainers one seed"),
        (several(shuffled, 1, 1), 'give each of them the same object as "train"'),
        (several(lambda: loader, 1, 1), "give each of them the same object"),  # a stream for each run
        (several(lambda: wrapped, 1, 1), "several runs cannot share"),
        ([], "give Trainers"),
        ([TinyTask()], "give Trainers"),
    ]
    for trainers, said in wrong:
        with pytest.raises(ConfigError, match=said):
            everstep.trainer.MultiRun(trainers)


def test_a_copy_has_its_own_memory_and_the_strides() -> None:
    array = np.arange(24.0).reshape(2, 3, 4)
    for each in (array, array[:, ::-1], array.T, array[:, :1].transpose(1, 2, 0)):
        made = copy_batch({"x": (each, [each])})["x"][0]
        assert made.strides == each.strides and np.array_equal(made, each)
        assert not np.shares_memory(made, each)
    tensor = torch.arange(6.0).reshape(2, 3).T
    assert copy_batch(tensor).stride() == tensor.stride()
