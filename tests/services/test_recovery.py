"""Recovery: a failed step is undone, without the batches that spoilt it; `Retry`: it is tried again."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import everstep
from counting import Uncounted
from everstep import Every, polling
from everstep.contracts.services import Outcome, Service, Stage, Stop
from everstep.errors import (
    CheckpointError,
    ConfigError,
    DivergenceError,
    GuardStop,
    LossBoundError,
    NonFiniteError,
    RolledBack,
    TriedAgain,
)
from everstep.polling import wait_until
from everstep.record import RunJournal
from everstep.services import LossBound, Recovery, Retry
from everstep.supervisor.leaving import undoing
from everstep.testing import armed
from tiny_runs import Acts, Boom, Tiny, boom_at, rows
from tiny_task import TinyTask, numbers, trainer

Place = tuple[int, int]
"""A batch: (pass, index), both from 0."""

SEED = 7


class Spoilt(Tiny):
    """Some batches spoil their step: its loss (or, `late`, the weights after it) is NaN."""

    def __init__(
        self, run_dir: Path, bad: set[Place], *, late: bool = False, save: int = 5, **arguments: Any
    ) -> None:
        saves = everstep.Checkpoints(Every(steps=save), keep_last=arguments.pop("keep_last", 3))
        services = [saves, *arguments.pop("services", [Recovery()])]
        super().__init__(run_dir, **{"samples": 40, "max_epoch": 2, **arguments, "services": services})
        self.bad = [(at, set(self.data.sample_ids("train", *at, seed=SEED))) for at in bad]
        self.late = late

    def update(self, ids: Any) -> None:
        super().update(ids)
        for (which, _), samples in self.bad:
            if which + 1 == self.loop.epoch and samples == set(ids.tolist()):
                if self.late:
                    self.w[0] = math.nan
                else:
                    self.loop.collect_metrics(other_loss=math.nan)


def finish(run_dir: Path, bad: set[Place], crash: int = 0, **arguments: Any) -> Spoilt:
    """Start it, and again after each rollback; it may crash in a step."""

    def main() -> Spoilt:
        program = Spoilt(run_dir, bad, **arguments)
        program.train(inside=boom_at(crash))
        return program

    return everstep.recovering(main)


def quarantined(run_dir: Path) -> list[list[Place]]:
    """By rollback."""
    undone = RunJournal(run_dir).rollbacks()
    return [[(b.pass_index, b.batch_index) for b in one.batches] for one in undone]


class Without:
    """The stream of `Tiny` as if some batches were not in it."""

    def __init__(self, samples: int, out: set[Place]) -> None:
        self._data = everstep.data.arrays(np.arange(samples), batch_size=2, shuffle=True)
        self._out, self._pass = out, -1

    def __iter__(self) -> Iterator[Any]:
        self._pass += 1
        cursor = self._data.open("train", self._pass, seed=SEED)
        return (batch for at, batch in enumerate(cursor) if (self._pass, at) not in self._out)


def never_had(run_dir: Path, out: set[Place], *, samples: int = 40) -> tuple[bytes, list[Any]]:
    """Weights and rows of an undisturbed run over data that never had these batches."""
    program = Tiny(run_dir, samples=samples, max_epoch=2, services=[everstep.Checkpoints(Every(epochs=1))])
    program.data = Without(samples, out)  # type: ignore[assignment]
    program.train()
    return program.w.tobytes(), rows(run_dir, "step")


def as_if_never_had(run_dir: Path, program: Spoilt, out: set[Place], **arguments: Any) -> None:
    """The program ended as a run over data without these batches does, but for the row of the NaN."""
    expected = never_had(run_dir.with_name("expected"), out, **arguments)
    assert (program.w.tobytes(), rows(run_dir, "step")) == expected
    assert not [line for line in program.lines if "differs" in line]


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(
    ("bad", "save"),
    [
        ({(0, 49)}, 20),
        ({(0, 2)}, 1000),  # before the first scheduled save: back to step 0
        ({(0, 7), (1, 33)}, 10),  # two places, a later epoch
        ({(0, 59)}, 10),  # the last batch of an epoch
        ({(1, 0), (1, 59)}, 10),
        ({(0, 49)}, 1),
    ],
)
def test_the_run_ends_as_if_the_data_never_had_the_batch(tmp_path: Path, bad: set[Place], save: int) -> None:
    run_dir = tmp_path / "run"
    program = finish(run_dir, bad, save=save, samples=120)
    assert quarantined(run_dir) == [[place] for place in sorted(bad)]
    assert program.loop.ending.finished and program.loop.ending.rollbacks == len(bad)
    assert program.loop.step == 120 - len(bad)
    as_if_never_had(run_dir, program, bad, samples=120)


def test_what_is_said_and_recorded(tmp_path: Path) -> None:
    first = Spoilt(tmp_path, {(0, 12)}, save=4)
    with pytest.raises(RolledBack) as left:
        first.train()
    assert (left.value.code, left.value.number) == (3, 1)
    samples = first.data.sample_ids("train", 0, 12, seed=SEED)
    (line,) = [line for line in first.lines if line.startswith("rollback")]
    assert line == (
        "rollback 1 of 3: metric 'other_loss' is nan at step 13. Quarantined: batch 13 of pass 1 of stream "
        f"'train' (samples {samples[0]}, {samples[1]}); the run continues from step-00000012"
    )
    assert str(left.value).startswith(line)
    (one,) = RunJournal(tmp_path).rollbacks()
    assert (one.number, one.step, one.first, one.checkpoint) == (1, 13, 13, "step-00000012")
    again = Spoilt(tmp_path, {(0, 12)}, save=4).train()
    assert again.loop.ending.resumed_from == "step-00000012"


def test_a_nan_that_shows_a_step_later_widens_the_quarantine(tmp_path: Path) -> None:
    """Batch 11 ruins the weights; step 13 has the NaN, with batch 12 and, without it, with batch 13."""
    run_dir = tmp_path / "run"
    program = finish(run_dir, {(0, 11)}, late=True, save=8)
    assert quarantined(run_dir) == [[(0, 12)], [(0, 11), (0, 13)]]
    as_if_never_had(run_dir, program, {(0, 11), (0, 12), (0, 13)})


@pytest.mark.parametrize("save", [1, 4])
def test_weights_that_only_a_save_finds_bad_warn_unless_the_step_is_known(tmp_path: Path, save: int) -> None:
    services = [Recovery(), everstep.services.NaNGuard(metrics=["none"])]
    program = Spoilt(tmp_path, {(0, 9)}, late=True, save=save, services=services)
    with pytest.raises(RolledBack, match=r"after step (10|12), NaN or infinity in user/"):
        program.train()
    warning = "went bad in one of the steps 9 to 12, no metric tells which"
    assert sum(warning in line for line in program.lines) == (save == 4)


def test_widening_goes_back_behind_the_newest_checkpoint(tmp_path: Path) -> None:
    """The batch before was consumed by a checkpoint that looked good: that one is left behind."""
    run_dir = tmp_path / "run"

    class Delayed(Spoilt):
        """Batch 9 makes a number in the state too large, by which step 12 fails."""

        def update(self, ids: Any) -> None:
            Tiny.update(self, ids)
            if {9} & {at for (_, at), samples in self.bad if samples == set(ids.tolist())}:
                self.momentum[:] = 1e6
            self.loop.collect_metrics(size_loss=float(abs(self.w).max()))

    def main() -> Delayed:
        services = [Recovery(), LossBound("size_loss", bound=1.5e5)]
        return Delayed(run_dir, {(0, 9)}, save=1, services=services).train()  # type: ignore[return-value]

    everstep.recovering(main)
    assert quarantined(run_dir) == [[(0, 11)], [(0, 10), (0, 12)], [(0, 9), (0, 13), (0, 14)]]
    from_ = [one.checkpoint for one in RunJournal(run_dir).rollbacks()]
    assert from_ == ["step-00000011", "step-00000010", "step-00000009"]


def test_a_program_that_asks_for_a_checkpoint_follows_a_rollback_to_before_it(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        Spoilt(tmp_path, set(), save=1, keep_last=None).train(inside=boom_at(16))
    failures = iter([True, True])

    def inside(loop: Any, step: int) -> None:
        if step == 13 and next(failures, False):
            raise NonFiniteError("this step fails")

    options: Any = {"save": 1, "keep_last": None, "resume": 12}
    program = everstep.recovering(lambda: Spoilt(tmp_path, set(), **options).train(inside))
    undone = [one.checkpoint for one in RunJournal(tmp_path).rollbacks()]
    assert undone == ["step-00000012", "step-00000011"]
    assert program.loop.ending.finished and program.loop.ending.resumed_from == undone[-1]


@pytest.mark.campaign("long")
def test_a_start_from_nothing_that_saved_nothing_forgets_no_rollback(tmp_path: Path) -> None:
    run_dir, bad = tmp_path / "run", {(0, 12)}
    with pytest.raises(RolledBack):
        Spoilt(run_dir, bad, save=4).train()
    with armed("ENOSPC:checkpoint.rename:1-99"), pytest.raises(CheckpointError, match="trial save"):
        Spoilt(run_dir, bad, resume=False).train()
    program = finish(run_dir, bad, save=4)
    assert quarantined(run_dir) == [[(0, 12)]]
    as_if_never_had(run_dir, program, bad)


def stands(call: Callable[[], object]) -> str:
    """What is noted on the failure that stands."""
    with pytest.raises((NonFiniteError, RolledBack)) as failed:
        call()
    return " ".join(failed.value.__notes__)


def test_the_tries_are_bounded(tmp_path: Path) -> None:
    bad = {(0, n) for n in (3, 8, 14)}
    for _ in range(2):  # a start after it fails in the same way
        note = stands(lambda: finish(tmp_path, bad, services=[Recovery(2)]))
        assert "step 13 is not undone: all 2 rollbacks are used up; for more, raise max_rollbacks=2" in note
        assert "max_rollbacks=2 of Recovery, or give reset_after=; quarantined are batch 4 of pass 1" in note
    program = finish(tmp_path, bad, services=[Recovery(3)])
    assert program.loop.ending.rollbacks == 3


@pytest.mark.campaign("long")
def test_a_sample_that_all_rollbacks_have_in_common_is_named(tmp_path: Path) -> None:
    data = everstep.data.arrays(np.arange(40), batch_size=2, shuffle=True)
    ids = {(n, at): data.sample_ids("train", n, at, seed=SEED) or () for n in range(3) for at in range(20)}
    bad = {place for place, samples in ids.items() if 17 in samples}
    services = [Recovery(2, reset_after=1000)]
    note = stands(lambda: finish(tmp_path, bad, max_epoch=3, services=services))
    assert "or lower reset_after=1000; each of them quarantined sample 17 of stream 'train': look" in note


@pytest.mark.campaign("long")
def test_after_enough_good_steps_the_tries_count_anew(tmp_path: Path) -> None:
    bad = {(0, 3), (0, 14), (1, 7)}
    finish(tmp_path / "run", bad, services=[Recovery(1, reset_after=10)])
    assert len(quarantined(tmp_path / "run")) == 3
    with pytest.raises(NonFiniteError):
        finish(tmp_path / "other", bad, services=[Recovery(1, reset_after=11)])
    assert len(quarantined(tmp_path / "other")) == 1


def judge(at: int, step: int | None = None) -> Service:
    """A service of the user's own that gives up at a step."""
    stop = Outcome(actions=(Stop("too bad", failed=True, step=step),))
    return Acts("judge", lambda boundary: stop if boundary.step == at else None, Stage.DECIDE)


@pytest.mark.campaign("long")
def test_whatever_names_a_bad_step_is_undone(tmp_path: Path) -> None:
    bound, guard = partial(LossBound, "other_loss", bound=1e9), everstep.services.NaNGuard
    guards: dict[str, Any] = {"stop": [guard("stop")], "bound": [guard(metrics=[]), bound()]}
    guards["bound, stop"] = [guard(metrics=[]), bound(policy="stop")]
    for name, services in guards.items():
        program = finish(tmp_path / name, {(0, 7)}, services=[Recovery(), *services])
        assert quarantined(tmp_path / name) == [[(0, 7)]], name
        assert program.loop.ending.finished

    def inside(loop: Any, step: int) -> None:
        if step == 9 and loop.segment == 1:
            raise NonFiniteError("an error of the user's own")

    everstep.recovering(lambda: Spoilt(tmp_path / "raised", set()).train(inside))
    assert quarantined(tmp_path / "raised") == [[(0, 8)]]
    with pytest.raises(GuardStop):  # a stop for good: as if there were no Recovery
        finish(tmp_path / "own", set(), services=[Recovery(), judge(at=9)])
    assert quarantined(tmp_path / "own") == [[(0, 8)], [(0, 7), (0, 9)], [(0, 6), (0, 10), (0, 11)]]
    with pytest.raises(GuardStop):
        finish(tmp_path / "early", set(), services=[Recovery(1), judge(at=9, step=6)])
    assert quarantined(tmp_path / "early") == [[(0, 5)]]


def test_a_state_that_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    """Nothing watches a metric: the NaN is found in the state after step 10, two steps after the batch."""
    services = [Recovery(), everstep.services.NaNGuard(metrics=[])]
    program = finish(tmp_path, {(0, 8)}, late=True, services=services)
    assert quarantined(tmp_path) == [[(0, 9)], [(0, 8), (0, 10)]]
    assert program.loop.ending.finished


def test_without_recovery_the_failure_stands_and_a_quarantine_still_holds(tmp_path: Path) -> None:
    with pytest.raises(RolledBack):
        Spoilt(tmp_path, {(0, 7)}).train()
    program = Spoilt(tmp_path, {(0, 7)}, services=()).train()
    assert program.loop.ending.finished
    assert len({row[1] for row in rows(tmp_path, "step")}) == 39
    with pytest.raises(LossBoundError):
        finish(tmp_path / "none", set(), services=[LossBound(bound=-1.0)])


def test_a_pass_of_one_batch_that_is_quarantined(tmp_path: Path) -> None:
    program = finish(tmp_path, {(2, 0)}, samples=2, max_epoch=5, save=1)
    assert quarantined(tmp_path) == [[(2, 0)]] and program.loop.ending.finished
    assert [(epoch, step) for epoch, step, *_ in rows(tmp_path, "step")] == [(1, 1), (2, 2), (4, 3), (5, 4)]


def test_what_cannot_be_undone_is_told_and_a_later_start_may(tmp_path: Path) -> None:
    run = tmp_path / "unwritten"
    with armed("ENOSPC:loop.rollback:1"):  # a decision that cannot be written is not made
        assert "could not be written" in stands(Spoilt(run, {(0, 7)}, save=1000).train)
    assert finish(run, {(0, 7)}, save=1000).loop.ending.rollbacks == 1

    def late() -> Tiny:
        tail = lambda loop, epoch: loop.collect_metrics(valid_loss=math.nan)  # noqa: E731
        return Spoilt(tmp_path / "late", set(), save=3, keep_last=1).train(tail=tail)

    assert "no checkpoint from before that step is left" in stands(lambda: everstep.recovering(late))

    run = tmp_path / "anew"
    assert "resume=False" in stands(lambda: finish(run, {(0, 7)}, resume=False))
    with pytest.raises(RolledBack):
        Spoilt(run, {(0, 7)}, resume=False).train()
    assert finish(run, {(0, 7)}).loop.ending.rollbacks == 1, "starting over forgets"

    def without_data() -> None:
        state = {"n": {"n": 0}}
        with everstep.TrainLoop(tmp_path / "no data", state, max_step=5, services=[Recovery()]) as loop:
            for _ in loop.iter_epochs():
                for _ in loop.iter_steps():
                    loop.collect_metrics(loss=math.nan)

    assert "read no batch" in stands(without_data)


def test_a_stream_whose_batches_have_no_number_is_refused_at_its_start(tmp_path: Path) -> None:
    def program(*services: Service) -> Spoilt:
        made = Spoilt(tmp_path, {(0, 12)}, save=4, services=services)
        made.data = Uncounted(made.data)  # type: ignore[assignment]
        return made

    message = r"give the cursor of your data the attribute done, "
    first = program(Recovery())
    with pytest.raises(ConfigError, match=f"{message}.* or leave out Recovery"):
        first.train()
    assert first.seen == []
    with pytest.raises(RolledBack):
        Spoilt(tmp_path, {(0, 12)}, save=4).train()
    for services in ([Recovery()], []):  # what is quarantined stays so
        with pytest.raises(ConfigError, match=rf"{message}[^,]* at a position$"):
            program(*services).train()


@pytest.mark.campaign("long")
@pytest.mark.parametrize("how", ["deleted", "damaged", "the newest two deleted"])
def test_a_rollback_that_the_journal_forgot_counts_and_keeps_batches_out(tmp_path: Path, how: str) -> None:
    run_dir, bad = tmp_path / "run", {(0, 7), (1, 3)}
    with pytest.raises(Boom):
        finish(run_dir, {(0, 7)}, crash=14)
    files = sorted((run_dir / "journal").glob("segment-*.evj"))
    for path in files[-2:] if how.startswith("the newest") else files:
        path.unlink() if "deleted" in how else path.write_bytes(bytes(path.stat().st_size))
    again = Spoilt(run_dir, bad, services=[Recovery(1)])
    with pytest.raises(NonFiniteError, match="all 1 rollbacks are used up"):
        again.train()
    assert "journal: rollback 1 is missing; it is taken from the checkpoint" in "\n".join(again.lines)
    more = finish(run_dir, bad, services=[Recovery(2)], on_change="override")
    assert more.loop.ending.rollbacks == 2 and more.loop.step == 38
    assert more.w.tobytes() == never_had(tmp_path / "expected", bad)[0]
    assert [each.number for each in RunJournal(run_dir).rollbacks()][-1] == 2


def test_a_number_that_is_missing_is_a_rollback_that_was_lost_and_waits_grow() -> None:
    def at(number: int, step: int) -> Any:
        return everstep.record.Rollback(number, step, "", step, "", (), 1)

    assert Recovery().used([at(3, 10)], 11) == Recovery().used([at(1, 10), at(3, 20)], 21) == 3
    assert Recovery(reset_after=8).used([at(1, 10), at(3, 20)], 21) == 2
    assert Recovery(reset_after=8).used([at(1, 10), at(2, 12)], 20) == 0
    assert [Retry(backoff=0.5).seconds(attempt) for attempt in (1, 2, 3)] == [0.5, 1.0, 2.0]
    assert Retry(OSError).errors == (OSError,)


LISTED = (ConnectionError,)


class Fault:
    """Raises at certain calls, which are counted over all tries, from 1."""

    def __init__(self, *at: int) -> None:
        self.at, self.calls = at, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls in self.at:
            np.random.standard_normal(5)  # what a failed try draws is taken back
            raise ConnectionError(f"call {self.calls}")


class Data:
    """Samples that may fail to come."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        self.fault()
        return np.float64(index + np.random.standard_normal())


class Task(TinyTask):
    """Its data, steps and evaluations may fail, half done."""

    def __init__(self, step: Fault, evaluation: Fault) -> None:
        super().__init__()
        self.step, self.evaluation = step, evaluation

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        found = super().train_step((np.asarray(batch),))
        self.step()
        return found

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        self.evaluation()
        return super().eval_step(batch)


Calls = tuple[int, ...]


def train(
    run_dir: Path,
    *,
    data: Calls = (),
    step: Calls = (),
    evaluation: Calls = (),
    retry: Any = None,
    **more: Any,
) -> Any:
    task = Task(Fault(*step), Fault(*evaluation))
    samples = everstep.data.loader(Data(Fault(*data)), batch_size=2, shuffle=True)
    streams = {"train": samples, "valid": numbers(4, 2)}
    services = [retry or Retry(LISTED, backoff=0), everstep.Checkpoints(Every(steps=3) | Every(epochs=1))]
    door: Any = trainer(run_dir, task, streams=streams, services=services, **more)
    door.ending = door.run_training()
    return door


def tries(run_dir: Path) -> list[tuple[str, int]]:
    told = (event.data for event in RunJournal(run_dir).events("decision"))
    return [(each["of"], each["try"]) for each in told if each["what"] == "retry"]


FAULTS: dict[str, tuple[dict[str, Calls], list[tuple[str, int]]]] = {
    "data": ({"data": (11,)}, [("step 5", 1)]),
    "the first batch": ({"data": (1,)}, [("step 0", 1)]),
    "a step": ({"step": (5,)}, [("step 5", 1)]),
    "twice in a row": ({"step": (5, 7)}, [("step 5", 1), ("step 5", 2)]),
    "two steps": ({"step": (5, 9)}, [("step 5", 1), ("step 7", 1)]),
    "an evaluation": ({"evaluation": (2,)}, [("step 8", 1)]),
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    return run_dir, train(run_dir)


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(("faults", "expected"), FAULTS.values(), ids=FAULTS)
def test_after_a_try_nothing_has_failed(tmp_path: Path, straight: Any, faults: Any, expected: Any) -> None:
    undisturbed, door = straight
    again = train(tmp_path / "run", **faults)  # type: ignore[arg-type]
    assert again.task.w.tobytes() == door.task.w.tobytes()
    assert rows(tmp_path / "run") == rows(undisturbed)
    assert again.ending.finished and again.ending.digest == door.ending.digest
    assert tries(tmp_path / "run") == expected


def test_a_save_is_tried_again_where_it_failed(tmp_path: Path, straight: Any) -> None:
    undisturbed, door = straight
    with armed("EIO:checkpoint.rename:3-4"):
        again = train(tmp_path / "run", retry=Retry([OSError], backoff=0))
    assert again.task.w.tobytes() == door.task.w.tobytes() and rows(tmp_path / "run") == rows(undisturbed)
    assert [number for _, number in tries(tmp_path / "run")] == [1, 2]
    assert again.ending.failed_saves == 0
    said = [text for text in again.ending.warnings if ".calls: " not in text]  # which the task counts
    assert len(said) == 2 and "try 2 of 3" in said[1]


def test_the_last_try_raises_the_original_error_with_the_count(tmp_path: Path) -> None:
    for _ in range(2):  # a later start has all its tries
        with pytest.raises(ConnectionError, match="call") as raised:
            train(tmp_path / "run", data=tuple(range(11, 999)), retry=Retry(LISTED, times=2, backoff=0))
        assert "tried again 2 times (Retry(times=2))" in " ".join(raised.value.__notes__)
    assert [number for _, number in tries(tmp_path / "run")] == [1, 2, 1, 2]
    with armed("EIO:checkpoint.rename:1-99"), pytest.raises(everstep.errors.CheckpointError) as refused:
        train(tmp_path / "save", retry=Retry([OSError], times=2, backoff=0))
    assert "tried again 2 times" in " ".join(refused.value.__cause__.__notes__)  # type: ignore[union-attr]


def test_other_batches_than_before_the_stop_are_not_tried_again(tmp_path: Path) -> None:
    def start(order: list[int], *services: everstep.Service, boom: int = 0) -> None:
        services = (everstep.Checkpoints(Every(steps=2)), *services)
        with everstep.TrainLoop(tmp_path, {"w": np.zeros(2)}, seed=7, max_epoch=1, services=services) as loop:
            for _ in loop.iter_epochs():
                for step, _ in loop.iter_steps([np.full(2, at) for at in order]):
                    if step == boom:
                        raise ConnectionError

    with pytest.raises(ConnectionError):
        start([0, 1, 2, 3], boom=4)
    with pytest.raises(DivergenceError):
        start([3, 2, 1, 0], Retry([Exception], backoff=0))
    assert tries(tmp_path) == []


def test_neither_another_error_nor_what_can_be_read_only_once_is_tried_again(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError):
        train(tmp_path / "other", step=(5,), retry=Retry([TimeoutError], backoff=0))
    assert tries(tmp_path / "other") == []
    task = Task(Fault(3), Fault())
    stream, services = iter([np.ones(2)] * 9), [Retry(LISTED, backoff=0)]
    door = trainer(tmp_path / "run", task, streams={"train": stream}, services=services, max_step=5)
    with pytest.raises(ConnectionError) as raised:
        door.run_training()
    assert "'train' is an iterator, which cannot be read again" in " ".join(raised.value.__notes__)


def program(run_dir: Path, fault: Fault, **options: Any) -> Tiny:
    """A loop of the user's own, made anew at each try."""

    def main() -> Tiny:
        tiny = Tiny(run_dir, max_epoch=3, services=[Retry(LISTED, **{"backoff": 0, **options})])
        return tiny.train(inside=lambda loop, step: fault())

    return everstep.recovering(main)


def test_a_loop_of_ones_own_goes_on_by_recovering_or_at_its_next_start(tmp_path: Path) -> None:
    whole = program(tmp_path / "straight", Fault()).result()
    assert program(tmp_path / "recovering", Fault(6, 9)).result() == whole
    alone = Tiny(tmp_path / "alone", max_epoch=3, services=[Retry(LISTED, backoff=0)])
    with pytest.raises(TriedAgain) as raised:
        alone.train(inside=lambda loop, step: Fault(1)())
    assert raised.value.code == 3
    assert program(tmp_path / "alone", Fault()).result() == whole
    with pytest.raises(ConnectionError) as stands:
        program(tmp_path / "bounded", Fault(*range(6, 99)), times=2)
    assert "tried again 2 times" in " ".join(stands.value.__notes__)


def test_a_signal_ends_the_wait_and_the_next_goes_on(tmp_path: Path, straight: Any, monkeypatch: Any) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        os.kill(os.getpid(), signal.SIGTERM)

    def wait(ready: Callable[[], bool], limit: float, longest_pause: float) -> bool:
        assert longest_pause <= 0.02, "seconds until a signal is noticed"
        monkeypatch.setattr(polling, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
        return wait_until(ready, limit, longest_pause)

    # in the retries' own wait: a thread of another test that sleeps would send a second signal
    monkeypatch.setattr(undoing, "wait_until", wait)
    with pytest.raises(SystemExit) as ended:
        train(tmp_path / "run", step=(5,), retry=Retry(LISTED, backoff=600))
    monkeypatch.undo()
    assert ended.value.code == 128 + signal.SIGTERM and len(waits) == 1
    assert train(tmp_path / "run").task.w.tobytes() == straight[1].task.w.tobytes()
    assert rows(tmp_path / "run") == rows(straight[0])
