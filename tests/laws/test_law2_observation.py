"""Law 2: whoever looks, however often, the training has the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from law_support.training import Program

import everstep
from everstep import At, Boundary, Checkpoints, Every, Never, services
from everstep.proof.compare import ABSENT, compare_runs
from everstep.services import Console, Moment

pytestmark = pytest.mark.usefixtures("one_thread")

SHORT = ("--epochs", "3", "--batch", "32", "--accumulate", "2", "--data", "loader")
NO_SAVES = {"services": lambda: [Checkpoints(Never())], "loop": {"default_services": False}}

TRAINING = tuple(f"leaf/{part}" for part in ("user/", "rng/", "progress/", "streams/", "gradients"))
TRAINING += ("row/", "checkpoint")
"""What observation must not change; the observers' own state is theirs."""


@pytest.fixture(scope="module", params=["arrays", "loader", "plain"])
def data(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return ("--data", request.param)


@pytest.fixture(scope="module")
def unobserved(data: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run with nothing around it; it evaluates each epoch."""
    run_dir = tmp_path_factory.mktemp("unobserved") / "run"
    Program(arguments=(*SHORT, *data), **NO_SAVES).run(run_dir)
    return run_dir


def draw(*_: Any) -> None:
    """What an observer must be free to do."""
    random.random(), np.random.rand(), torch.rand(1)


class Sampler(everstep.Service):
    """Draws whenever it is called, as one that logs sampled images does, and has metrics."""

    def __init__(self, schedule: everstep.schedule.Schedule) -> None:
        super().__init__("sampler", schedule)
        self.runs = 0

    def open(self, run: Any) -> None:
        draw()

    def close(self) -> None:
        draw()

    def due(self, when: everstep.schedule.Instant) -> bool:
        draw()
        return super().due(when)

    def run(self, boundary: Boundary) -> everstep.Outcome:
        draw()
        self.runs += 1
        boundary.readings.stats("loss")
        return everstep.Outcome(metrics={"sampled": random.random()})

    def state_dict(self) -> Any:
        draw()
        return {"runs": self.runs}

    def load_state_dict(self, state: Any) -> None:
        self.runs = state["runs"]


def watch_all_moments(loop: everstep.TrainLoop) -> None:
    for moment in set(Moment) - {Moment.AFTER_EVAL_STEP}:  # a Trainer's alone
        loop.on(moment, draw)
    loop.on(Moment.AFTER_STEP, draw, every=3)
    loop.on(Moment.AFTER_STEP, lambda boundary: boundary.readings.clear(), every=At(5))


def talk(loop: everstep.TrainLoop, training: Any) -> None:
    """Every method that is for looking, in every step."""
    with loop.timeit("look_time"):
        loop.print_logs()
        loop.println("step", with_tag=True)
        loop.get_eta(), loop.get_progress()
        loop.add_summary({"step": loop.step})
    with loop.metric_collector("looks") as collected:
        collected.collect(loop.step, weight=2)


def evaluate_each_step(loop: everstep.TrainLoop, training: Any) -> None:
    with loop.evaluation():
        assert not training.model.training
        loop.collect_metrics(step_valid_loss=training.evaluate())
    assert training.model.training


def quiet(name: str, every: everstep.schedule.Schedule) -> Console:
    return Console(every, sink=lambda line: None, name=name, plain_seconds=0.001)


def many_services() -> list[everstep.Service]:
    often = Every(seconds=0.01)
    return [
        quiet("fast", Every(steps=1)), quiet("slow", often), Sampler(Every(steps=2) | Every(epochs=1)),
        everstep.Best("valid_loss"), everstep.EarlyStop("valid_loss", patience=99),
        services.NaNGuard(), services.StopAfter(steps=10_000),
        services.JSONLines(every=Every(steps=3)), services.CSV(), services.TensorBoard(every=often),
        Checkpoints(Every(steps=5) | often, keep_last=2, keep_every=Every(steps=4)),
    ]  # fmt: skip


OBSERVED: dict[str, Callable[..., Program]] = {
    "default services": Program,
    "checkpoints every step": partial(Program, services=lambda: [Checkpoints(Every(steps=1))]),
    "checkpoints all the time": partial(Program, services=lambda: [Checkpoints(Every(seconds=0.001))]),
    "all services": partial(Program, services=many_services),
    "a function at each moment": partial(Program, observe=watch_all_moments),
    "all that looks, in each step": partial(Program, each_step=talk),
    "an evaluation in each step": partial(Program, each_step=evaluate_each_step),
    "a thread": partial(Program, observe=lambda loop: loop.loop(0.001, lambda: loop.get_progress())),
    "everything": partial(Program, services=many_services, observe=watch_all_moments, each_step=talk),
}


def require_same_training(a: Path, b: Path) -> None:
    """Equal leaves, and equal rows where both have them (the observers may add some)."""
    found = [one for one in compare_runs(a, b) if one.path.startswith(TRAINING)]
    assert [one for one in found if one.path.startswith("leaf/") or ABSENT not in one] == []


@pytest.mark.campaign("long", gate=5)
@pytest.mark.parametrize("how", OBSERVED)
def test_observed_runs_have_the_bits_of_the_unobserved(unobserved, data, tmp_path: Path, how: str) -> None:
    OBSERVED[how](arguments=(*SHORT, *data)).run(tmp_path / "run")
    require_same_training(unobserved, tmp_path / "run")


@pytest.mark.campaign("long", gate=1)
def test_evaluated_or_not_but_not_bare(unobserved: Path, data: tuple[str, ...], tmp_path: Path) -> None:
    """That the comparison can tell: drawing random numbers outside `evaluation()` changes the training."""
    for how in ("none", "bare"):
        Program(arguments=(*SHORT, *data, "--evaluate", how), **NO_SAVES).run(tmp_path / how)
    require_same_training(unobserved, tmp_path / "none")
    paths = [one.path for one in compare_runs(unobserved, tmp_path / "bare")]
    assert "leaf/user/model/0.weight" in paths
