"""A metric has one writer at a moment; a stream is evaluated once; each word means one thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_task import numbers, trainer

import everstep
from everstep import Boundary, Evaluate, Every, Outcome, Service, Stage
from everstep.errors import ConfigError, MetricError
from tiny_runs import Tiny, rows


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
