"""Each moment fires behind each door, or asking for it is an error; services see what a step made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everstep
from everstep import Boundary, Every, Outcome, Service
from everstep.errors import ConfigError, MetricError
from everstep.services import Moment, Stage
from tiny_runs import Tiny, quiet, rows

Ask = Callable[[Any], object]
Door = Callable[..., Any]


def numbers(count: int) -> Any:
    return everstep.data.arrays(np.arange(count), batch_size=2)


def supervisor(run_dir: Path, ask: Ask = lambda loop: None, *services: Service) -> Any:
    with quiet(run_dir, {"w": np.zeros(1)}, max_step=4, services=services) as sv:
        ask(sv)
        batches = sv.stream(numbers(8))
        while not sv.should_stop():
            next(batches)
            sv.add_summary({"note": "seen"})
            sv.advance(loss=1.0)
    return sv


def train_loop(run_dir: Path, ask: Ask = lambda loop: None, *services: Service) -> Any:
    def tail(loop: Any, epoch: int) -> None:
        with loop.evaluation():
            loop.collect_metrics(valid_loss=0.5)
        loop.add_summary({"note": "seen"})
        loop.print_logs()

    tiny = Tiny(run_dir, max_epoch=1, services=services)
    ask(tiny.loop)
    return tiny.train(tail=tail).loop


class Task(everstep.Task):
    """Trains nothing, and returns metrics and what is none."""

    def __init__(self) -> None:
        self.w = np.zeros(1)

    def state(self) -> Mapping[str, Any]:
        return {"w": self.w}

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        return {"loss": 1.0}

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        return {"loss": 0.5}


def trainer(
    run_dir: Path, ask: Ask = lambda loop: None, *services: Service, task: everstep.Task | None = None
) -> Any:
    streams = {"train": numbers(8), "valid": numbers(4)}
    silent = everstep.services.Console(sink=lambda line: None)
    door = everstep.Trainer(
        task or Task(), streams, run_dir, services=[silent, *services], max_epoch=1, seed=7
    )
    with door.open() as loop:
        ask(loop)
        for _ in loop.iter_epochs():
            door.epoch()
            loop.add_summary({"note": "seen"})
    return loop


FIRES = {
    Moment.ENTER_LOOP: "TL T",  # a Supervisor's is over where `on` can be called in this test
    Moment.BEFORE_EPOCH: "TL T",
    Moment.BEFORE_STEP: "S TL T",
    Moment.AFTER_STEP: "S TL T",
    Moment.AFTER_EPOCH: "TL T",
    Moment.AFTER_EVAL_STEP: "T",
    Moment.AFTER_EVALUATION: "TL T",
    Moment.AFTER_CHECKPOINT: "S TL T",
    Moment.EXIT_LOOP: "S TL T",
    Moment.METRICS_COLLECTED: "S TL T",
    Moment.SUMMARY_ADDED: "S TL T",
    Moment.METRIC_STATS_PRINTED: "TL T",
    Moment.TIME_METRIC_STATS_PRINTED: "TL T",
}
DOORS: dict[str, Door] = {"S": supervisor, "TL": train_loop, "T": trainer}


class Asks(Service):
    """Wants one moment."""

    def __init__(self, moment: Moment) -> None:
        super().__init__(f"asks {moment.name}", Every(steps=1) | Every(epochs=1))
        self.moments = frozenset({moment})
        self.seen: list[Boundary] = []

    def run(self, boundary: Boundary) -> None:
        self.seen.append(boundary)


@pytest.mark.parametrize("door", DOORS)
def test_a_moment_fires_behind_a_door_or_asking_for_it_is_an_error(tmp_path: Path, door: str) -> None:
    fires = [each for each in Moment if door in FIRES[each].split() or each is Moment.ENTER_LOOP]
    services, heard = [Asks(moment) for moment in fires], {moment: list[Boundary]() for moment in fires}

    def ask(loop: Any) -> None:
        for moment in fires:
            loop.on(moment, heard[moment].append)

    DOORS[door](tmp_path / "run", ask, *services)
    for moment, service in zip(fires, services, strict=True):
        assert {boundary.moment for boundary in service.seen} == {moment}
        if moment is not Moment.ENTER_LOOP or door == "TL":  # else entered before `on` was called
            assert {boundary.moment for boundary in heard[moment]} == {moment}
    for moment, steps in {Moment.BEFORE_STEP: range(4), Moment.AFTER_STEP: range(1, 5)}.items():
        assert [b.step for b in heard[moment]] == list(steps)
        assert all(b.payload is not None for b in heard[moment])
    for moment in set(Moment) - set(fires):
        with pytest.raises(ConfigError, match=rf"'asks {moment.name}' asks for {moment.name}, which a"):
            DOORS[door](tmp_path / "service", lambda loop: None, Asks(moment))
        with pytest.raises(ConfigError, match=rf"on\(\) asks for {moment.name}, which a "):
            DOORS[door](tmp_path / "function", lambda loop, moment=moment: loop.on(moment, print))


def test_a_schedule_in_epochs_behind_a_supervisor_is_an_error(tmp_path: Path) -> None:
    message = r"service 'early stop loss' is due Every\(epochs=1\), and a Supervisor has no epochs.*steps="
    with pytest.raises(ConfigError, match=message):
        everstep.Supervisor(tmp_path, {}, services=[everstep.EarlyStop("loss", patience=1)])
    either = Every(epochs=1) | Every(steps=9)
    everstep.Supervisor(tmp_path, {}, services=[everstep.EarlyStop("loss", patience=1, every=either)])


def test_a_supervisors_step_has_its_newest_batch(tmp_path: Path) -> None:
    """Several streams give their batches by name; a step without a batch is a step."""

    def seen(name: str, program: Callable[[Any], Callable[[], object]]) -> tuple[list[Any], list[Any]]:
        before: list[Any] = []
        after: list[Any] = []
        with quiet(tmp_path / name, {"w": np.zeros(1)}, max_step=3) as sv:
            sv.on(Moment.BEFORE_STEP, lambda b: before.append((b.step, b.payload)))
            sv.on(Moment.AFTER_STEP, lambda b: after.append((b.step, b.payload)))
            draw = program(sv)
            while not (sv.should_stop() or sv.should_stop()):
                draw()
                sv.advance(loss=1.0)
        return before, after

    def two_at_a_time(sv: Any) -> Callable[[], object]:
        batches = sv.stream(range(6))
        return lambda: (next(batches), next(batches))

    def two_streams(sv: Any) -> Callable[[], object]:
        real, noise = sv.stream(list("abcdef"), "real"), sv.stream(range(6), "noise")
        return lambda: (next(noise), sv.step != 1 and next(real))

    def no_data(sv: Any) -> Callable[[], object]:
        sv.stream(None)
        return lambda: None

    def every_other(sv: Any) -> Callable[[], object]:
        batches = sv.stream(range(9))
        return lambda: sv.step != 1 and next(batches)

    assert seen("two", two_at_a_time) == ([(0, 0), (1, 2), (2, 4)], [(1, 1), (2, 3), (3, 5)])
    before, after = seen("named", two_streams)
    assert [step for step, _ in before] == [0, 1, 2]
    assert [b for _, b in after] == [{"noise": 0, "real": "a"}, {"noise": 1}, {"noise": 2, "real": "b"}]
    assert seen("none", no_data) == ([(0, None), (1, None), (2, None)], [(1, None), (2, None), (3, None)])
    assert seen("some", every_other) == ([(0, 0), (1, None), (2, 1)], [(1, 0), (2, None), (3, 1)])


class Looks(Service):
    """Looks at outputs of steps, and makes a metric of one."""

    stage = Stage.MEASURE
    outputs = ("loss", "scores")

    def __init__(self, every: int = 1) -> None:
        super().__init__("looks", Every(steps=every))
        self.seen: list[tuple[int, dict[str, Any]]] = []

    def run(self, boundary: Boundary) -> Outcome | None:
        self.seen.append((boundary.step, dict(boundary.outputs)))
        scores = boundary.outputs.get("scores")
        return None if scores is None else Outcome({"top": float(max(scores))})


class Scores(Task):
    """Its steps return scores of each sample, too."""

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        (ids,) = batch
        return {"loss": float(ids.mean()), "scores": ids * 1.0, "more": 1.0}


def test_a_service_sees_what_a_trainers_step_returned(tmp_path: Path) -> None:
    looks = Looks()
    trainer(tmp_path / "run", lambda loop: None, looks, task=Scores())
    assert [(step, seen["loss"], list(seen["scores"])) for step, seen in looks.seen] == [
        (step, 2 * step - 1.5, [2 * step - 2.0, 2 * step - 1.0]) for step in range(1, 5)
    ]
    assert {key for _, seen in looks.seen for key in seen} == {"loss", "scores"}
    with pytest.raises(MetricError, match=r"metric 'scores'"):  # no number, and nobody looks at it
        trainer(tmp_path / "other", task=Scores())
    names = {row[3] for row in rows(tmp_path / "run", "step")}
    assert names == {"loss", "more"}  # a number is a metric, too; scores are none
    assert len(rows(tmp_path / "run", "eval/looks")) == 4


def test_a_service_sees_what_advance_was_given(tmp_path: Path) -> None:
    looks, one = Looks(), Looks()
    one.name, one.outputs = "one", "loss"  # one name needs no tuple
    with quiet(tmp_path / "run", {}, services=[looks, one], max_step=2) as sv:
        sv.stream(None)
        while not sv.should_stop():
            sv.advance(loss=1.0, scores=[sv.step, 3])
    assert looks.seen == [(1, {"loss": 1.0, "scores": [0, 3]}), (2, {"loss": 1.0, "scores": [1, 3]})]
    assert {step: seen["loss"] for step, seen in one.seen} == {1: 1.0, 2: 1.0}
