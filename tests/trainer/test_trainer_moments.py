"""What happens around a Trainer's steps, in which order; and that the order of the services is no matter."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from tiny_task import TinyTask, numbers, trainer

import everstep
from everstep import Boundary, Moment, Service, Stage
from everstep.errors import UsageError

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

    first, *rest = epoch(1, 0)
    assert trace == [
        *evaluation(1, 0),
        first,
        *rest,
        *evaluation(1, 2),
        ("after_epoch", 1, 2),
        *epoch(2, 2),
        *evaluation(2, 4),
        ("after_epoch", 2, 4),
        ("exit_loop", 2, 4),
    ]


def test_observers_see_each_batch_of_an_evaluation(tmp_path: Path) -> None:
    seen: list[Any] = []
    found: list[Any] = []
    door = trainer(tmp_path / "run", max_epoch=1)
    with door.open() as loop:
        loop.on(Moment.AFTER_EVAL_STEP, lambda b: seen.append(b.payload))
        loop.on(Moment.AFTER_EVALUATION, lambda b: found.append(b.payload))
        for _ in loop.iter_epochs():
            door.epoch()
    assert [(s.stream, s.number, [int(i) for i in s.batch[0]]) for s in seen] == [
        ("valid", 1, [0, 1]),
        ("valid", 2, [2, 3]),
        ("valid", 3, [4]),
    ]
    assert set(seen[0].outputs) == {"loss", "noise"}
    assert [set(each) for each in found] == [{"valid/loss", "valid/noise"}]


def test_observers_of_an_evaluation_only_look(tmp_path: Path) -> None:
    door = trainer(tmp_path / "run", max_epoch=1)

    def program() -> None:
        with door.open() as loop:
            loop.on(Moment.AFTER_EVAL_STEP, lambda b: everstep.Outcome(actions=(everstep.Stop("me too"),)))
            for _ in loop.iter_epochs():
                door.epoch()

    with pytest.raises(UsageError, match="observer"):
        program()


class Traced(Service):
    """Notes when it runs."""

    def __init__(self, name: str, stage: Stage, trace: Trace) -> None:
        super().__init__(name, everstep.Every(steps=1) | everstep.Every(epochs=1))
        self.stage, self.trace = stage, trace

    def run(self, boundary: Boundary) -> None:
        self.trace.append((self.name, boundary.epoch, boundary.step))


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_services_of_different_stages_is_no_matter(tmp_path: Path, seed: int) -> None:
    def start(name: str, shuffled: bool) -> Trace:
        trace: Trace = []
        services: list[Service] = [
            Traced(f"{stage.name} {n}", stage, trace) for stage in Stage for n in (1, 2)
        ]
        services += [everstep.Evaluate("valid"), everstep.EarlyStop("valid/loss", patience=1, name="stop")]
        if shuffled:  # keeps the order inside each stage
            places = [service.stage for service in services]
            random.Random(seed).shuffle(places)
            of_stage = {stage: iter([s for s in services if s.stage is stage]) for stage in Stage}
            services = [next(of_stage[stage]) for stage in places]
        task = TinyTask()
        trainer(tmp_path / name, task, services=services, max_epoch=3).run_training()
        return [*trace, (task.w.tobytes().hex(), 0, 0)]

    assert start("shuffled", True) == start("listed", False)
