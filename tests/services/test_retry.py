"""`Retry`: what a listed error has ended is tried again, to the bit of a run in which nothing failed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import everstep
from everstep import Every, polling
from everstep.errors import DivergenceError, TriedAgain
from everstep.polling import wait_until
from everstep.record import RunJournal
from everstep.services import Retry
from everstep.supervisor.leaving import undoing
from everstep.testing import armed
from tiny_runs import Tiny, rows

LISTED = (ConnectionError,)


class Fault:
    """Raises at certain calls, counted over all tries.

    Args:
        at: the calls, from 1.
    """

    def __init__(self, *at: int, error: type[Exception] = ConnectionError) -> None:
        self.at, self.error, self.calls = at, error, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls in self.at:
            np.random.standard_normal(5)  # what a failed try draws is taken back
            raise self.error(f"call {self.calls}")


class Data:
    """Samples that may fail to come."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        self.fault()
        return np.float64(index + np.random.standard_normal())


class Task(everstep.Task):
    """Its data, steps and evaluations may fail, half done."""

    def __init__(self, step: Fault, evaluation: Fault) -> None:
        self.w, self.step, self.evaluation = np.zeros(3), step, evaluation

    def state(self) -> Mapping[str, Any]:
        return {"w": self.w}

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        self.w += 0.1 * (float(batch.mean()) + np.random.standard_normal(3))
        self.step()
        return {"loss": float(self.w @ self.w)}

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        self.evaluation()
        return {"loss": float(self.w.sum() + np.random.standard_normal())}


def train(
    run_dir: Path,
    *,
    data: tuple[int, ...] = (),
    step: tuple[int, ...] = (),
    evaluation: tuple[int, ...] = (),
    retry: Retry | None = None,
    **options: Any,
) -> everstep.Trainer:
    task = Task(Fault(*step), Fault(*evaluation))
    train = everstep.data.loader(Data(Fault(*data)), batch_size=2, shuffle=True)
    streams = {"train": train, "valid": everstep.data.arrays(np.arange(4), batch_size=2)}
    services = [
        Retry(LISTED, backoff=0) if retry is None else retry,
        everstep.services.Console(sink=lambda line: None),
        everstep.Checkpoints(Every(steps=3) | Every(epochs=1)),
    ]
    door = everstep.Trainer(task, streams, run_dir, services=services, seed=7, max_epoch=2, **options)
    door.ending = door.run_training()
    return door


def tries(run_dir: Path) -> list[tuple[str, int]]:
    told = (event.data for event in RunJournal(run_dir).events("decision"))
    return [(each["of"], each["try"]) for each in told if each["what"] == "retry"]


FAULTS: dict[str, tuple[dict[str, tuple[int, ...]], list[tuple[str, int]]]] = {
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
def test_after_a_try_the_run_is_that_in_which_nothing_failed(
    tmp_path: Path, straight: Any, faults: dict[str, tuple[int, ...]], expected: list[tuple[str, int]]
) -> None:
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
    counted, *said = again.ending.warnings
    assert counted.startswith("step.calls: ") and len(said) == 2 and "try 2 of 3" in said[1]


def test_the_last_try_raises_the_original_error_with_the_count(tmp_path: Path) -> None:
    for _ in range(2):  # a later start has all its tries
        with pytest.raises(ConnectionError, match="call") as raised:
            train(tmp_path / "run", data=tuple(range(11, 999)), retry=Retry(LISTED, times=2, backoff=0))
        assert "tried again 2 times (Retry(times=2))" in " ".join(raised.value.__notes__)
    assert [number for _, number in tries(tmp_path / "run")] == [1, 2, 1, 2]
    with armed("EIO:checkpoint.rename:1-99"), pytest.raises(everstep.errors.CheckpointError) as refused:
        train(tmp_path / "save", retry=Retry([OSError], times=2, backoff=0))
    assert "tried again 2 times" in " ".join(refused.value.__cause__.__notes__)  # type: ignore[union-attr]


def test_another_error_is_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError):
        train(tmp_path / "run", step=(5,), retry=Retry([TimeoutError], backoff=0))
    assert tries(tmp_path / "run") == []


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


def test_what_can_be_read_only_once_is_not_tried_again(tmp_path: Path) -> None:
    task = Task(Fault(3), Fault())
    services = [Retry(LISTED, backoff=0), everstep.services.Console(sink=lambda line: None)]
    stream = iter([np.ones(2)] * 9)
    door = everstep.Trainer(task, {"train": stream}, tmp_path / "run", services=services, max_step=5, seed=7)
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
    with pytest.raises(TriedAgain) as raised:
        Tiny(tmp_path / "alone", max_epoch=3, services=[Retry(LISTED, backoff=0)]).train(
            inside=lambda loop, step: Fault(1)()
        )
    assert raised.value.code == 3
    assert program(tmp_path / "alone", Fault()).result() == whole
    with pytest.raises(ConnectionError) as stands:
        program(tmp_path / "bounded", Fault(*range(6, 99)), times=2)
    assert "tried again 2 times" in " ".join(stands.value.__notes__)


def test_a_signal_ends_the_wait_and_the_next_start_goes_on(
    tmp_path: Path, straight: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        os.kill(os.getpid(), signal.SIGTERM)

    def wait(ready: Callable[[], bool], limit: float) -> bool:
        monkeypatch.setattr(polling, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
        return wait_until(ready, limit)

    # in the retries' own wait: a thread of another test that sleeps would send a second signal
    monkeypatch.setattr(undoing, "wait_until", wait)
    with pytest.raises(SystemExit) as ended:
        train(tmp_path / "run", step=(5,), retry=Retry(LISTED, backoff=600))
    monkeypatch.undo()
    assert ended.value.code == 128 + signal.SIGTERM and len(waits) == 1
    assert train(tmp_path / "run").task.w.tobytes() == straight[1].task.w.tobytes()
    assert rows(tmp_path / "run") == rows(straight[0])


def test_arguments() -> None:
    assert [Retry(backoff=0.5).seconds(attempt) for attempt in (1, 2, 3)] == [0.5, 1.0, 2.0]
    assert Retry(OSError).errors == (OSError,)
