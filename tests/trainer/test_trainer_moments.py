"""What happens around a Trainer's steps, in which order; and that the order of the services is no matter."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_task import TinyTask, numbers, trainer

import everstep
from everstep import Boundary, Moment, Service, Stage, services
from everstep.errors import UsageError
from everstep.proof.compare import compare_runs
from everstep.record import RunJournal

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


class TellsSamples(TinyTask):
    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        return {**super().eval_step(batch), "sample": batch[0]}


class LooksAtSamples(Service):
    """Names its only output without a tuple around it."""

    moments = frozenset({Moment.AFTER_EVAL_STEP})
    outputs = "sample"

    def __init__(self) -> None:
        super().__init__("looks at samples", everstep.Every(epochs=1))
        self.seen: list[int] = []

    def run(self, boundary: Boundary) -> None:
        self.seen += [int(each) for each in boundary.payload.outputs["sample"]]


def test_one_output_of_an_evaluation_may_be_named_without_a_tuple(tmp_path: Path) -> None:
    service = LooksAtSamples()
    door = trainer(tmp_path / "run", TellsSamples(), max_epoch=1, services=[service])
    with door.open() as loop:
        for _ in loop.iter_epochs():
            door.epoch()
    assert service.seen == [0, 1, 2, 3, 4]


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


def listed(trace: Trace) -> list[Service]:
    """Every service that a run on NumPy can have, and two of each stage that note when they run."""
    lower = everstep.SetValue("rate.value", times=0.5, least=0.1)
    return [
        *(Traced(f"{stage.name} {n}", stage, trace) for stage in Stage for n in (1, 2)),
        everstep.Evaluate("valid", validate_first=True),
        everstep.Evaluate("test", everstep.Every(steps=3), num_steps=1),
        everstep.NaNGuard(),
        everstep.EarlyStop("valid/loss", patience=2, min_delta=1e3, name="stop"),
        everstep.EarlyStop("test/noise", "max", patience_steps=90, name="late stop"),
        everstep.Best("valid/loss"),
        everstep.Best("test/noise", "max"),
        everstep.StopAfter(epochs=9),
        everstep.Checkpoints(everstep.Every(steps=3) | everstep.Every(epochs=1), keep_last=2),
        services.LossBound(bound=1e9, times=1e9, last=3),
        services.Plateau("loss", then=lower, long=3, short=2, cooldown=1, every=everstep.Every(steps=2)),
        services.Require("valid/loss", 1e9, epoch=2),
        services.Scheduled("rate.noise", services.Annealing(0.1, 0.8, every=2)),
        services.LogVariables(["*loss"], every=everstep.Every(steps=5)),
        services.FinalValues(lambda: {"final": 1.0}),
        services.Throughput(2, every=everstep.Every(steps=3)),
        services.CSV(),
        services.JSONLines(),
    ]


class Rated(TinyTask):
    """Its noise and its rate are set by services."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = {"value": 1.0, "noise": 0.0}

    def state(self) -> Mapping[str, Any]:
        return {**super().state(), "rate": self.rate}

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        return super().train_step((batch[0] * self.rate["value"] + self.rate["noise"],))


def run_with(run_dir: Path, order: Sequence[int] | None) -> tuple[Trace, list[Any], list[Any], bytes]:
    """What came when: which service or moment, the rows, the decisions; and the weights.

    Args:
        order: of all services; the order inside each stage is kept.  None: as they are listed.
    """
    trace: Trace = []
    chosen = listed(trace)
    if order is not None:
        stages = [chosen[place].stage for place in order]
        of_stage = {stage: iter([s for s in chosen if s.stage is stage]) for stage in Stage}
        chosen = [next(of_stage[stage]) for stage in stages]
    task = Rated()
    door = trainer(run_dir, task, services=chosen, max_epoch=5)
    with door.open() as loop:
        for moment in (
            Moment.BEFORE_STEP,
            Moment.AFTER_EVAL_STEP,
            Moment.AFTER_EVALUATION,
            Moment.AFTER_EPOCH,
        ):
            loop.on(moment, lambda b: trace.append((b.moment.value, b.epoch, b.step)))
        for _ in loop.iter_epochs():
            door.epoch()
    decided = [(event.kind, event.data) for event in RunJournal(run_dir).events("stop")]
    written = [row for row in RunJournal(run_dir).rows() if not row.wall]
    keys = [(r.epoch, r.step, r.phase, r.name, r.seq, r.value.hex()) for r in written]
    return trace, keys, decided, task.w.tobytes()


@pytest.fixture(scope="module")
def in_listed_order(tmp_path_factory: pytest.TempPathFactory) -> Any:
    run_dir = tmp_path_factory.mktemp("order") / "listed"
    return run_dir, run_with(run_dir, None)


@pytest.mark.campaign("long")
@settings(deadline=None, max_examples=8)
@given(order=st.permutations(range(len(listed([])))))
def test_the_order_of_services_of_different_stages_is_no_matter(
    in_listed_order: Any, order: Sequence[int]
) -> None:
    run_dir, expected = in_listed_order
    assert expected[2] and expected[2][0][1]["kind"] == "service"
    with tempfile.TemporaryDirectory() as folder:
        assert run_with(Path(folder) / "run", order) == expected
        assert compare_runs(run_dir, Path(folder) / "run") == []
