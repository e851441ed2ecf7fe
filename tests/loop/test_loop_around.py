"""What a TrainLoop does around the steps: clocks, evaluations, saves, and what must train."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep import Boundary, Every, Service
from everstep.errors import Interrupted, ProgressError, StateError
from everstep.testing import ManualClock, nothing_left
from tiny_runs import Tiny, events


def test_a_time_budget_is_noticed_without_any_service_due(tmp_path: Path) -> None:
    """The timer thread wakes a loop in which nothing else would."""
    loop = everstep.TrainLoop(tmp_path, max_time=0.05, max_step=1 << 40, default_services=False)

    def train() -> None:
        with loop:
            for _ in loop.iter_epochs():
                for _ in loop.iter_steps():
                    pass

    with nothing_left(), pytest.raises(Interrupted, match=r"0\.05 s is used up") as raised:
        train()
    assert raised.value.code == 3  # after no step where the start takes that long


class Ticks(Service):
    """Notes the steps at which it ran, and who else lives then."""

    def __init__(self) -> None:
        super().__init__("ticks", Every(seconds=10))
        self.ran: list[int] = []
        self.threads: set[str] = set()

    def run(self, boundary: Boundary) -> None:
        self.ran.append(boundary.step)
        self.threads |= {thread.name for thread in threading.enumerate()}


def supervised(run_dir: Path, clock: Any, ticks: Ticks, seconds: float) -> None:
    with everstep.Supervisor(run_dir, services=[ticks], clock=clock, max_step=10) as sv:
        sv.stream(None)
        while not sv.should_stop():
            clock.advance(seconds)
            sv.advance()


def looped(run_dir: Path, clock: Any, ticks: Ticks, seconds: float) -> None:
    tiny = Tiny(run_dir, samples=20, max_epoch=1, clock=clock, services=[ticks])
    tiny.train(inside=lambda loop, step: clock.advance(seconds))


@pytest.mark.parametrize("door", [supervised, looped])
@pytest.mark.parametrize(("seconds", "first"), [(4.0, [3, 6, 9]), (0.0, [])])
def test_a_clock_of_ones_own_drives_schedules_in_seconds_by_itself(
    tmp_path: Path, door: Any, seconds: float, first: list[int]
) -> None:
    """At the very step at which its time has come: no thread looks at it, and no other service is due."""
    ticks = Ticks()
    door(tmp_path / "run", ManualClock(), ticks, seconds)
    assert ticks.ran[:3] == first
    assert "everstep-timer" not in ticks.threads


def test_the_parts_of_the_time_sum_to_the_whole(tmp_path: Path) -> None:
    clock = ManualClock()

    class Slow:
        def __iter__(self) -> Any:
            for _ in range(4):
                clock.advance(0.25)
                yield ()

    seen: dict[str, float] = {}

    def printed(boundary: everstep.Boundary) -> None:
        seen.update({name: stats.mean * stats.count for name, stats in boundary.payload.items()})

    with everstep.TrainLoop(tmp_path / "run", {"a": []}, max_epoch=2, clock=clock) as loop:
        loop.on(everstep.services.Moment.TIME_METRIC_STATS_PRINTED, printed)
        for _ in loop.iter_epochs():
            for _ in loop.iter_steps(everstep.data.replay(Slow())):
                clock.advance(1.0)
            with loop.evaluation(), loop.timeit("valid_time"):
                clock.advance(3.0)
            loop.print_logs()
    assert seen == {"step_time": 4.0, "valid_time": 3.0, "epoch_time": 8.0}
    assert [
        (t["epoch"], t["steps"], t["seconds"], t["data_wait"]) for t in events(loop.run_dir, "times")
    ] == [
        (1, [1, 4], 8.0, 1.0),
        (2, [5, 8], 8.0, 1.0),
    ]


@pytest.mark.parametrize("where", ["steps", "tail"])
def test_evaluating_on_the_training_loader_leaves_the_training_where_it_is(
    tmp_path: Path, where: str
) -> None:
    def train(name: str, evaluate_in: str) -> list[int]:
        torch.manual_seed(3)
        data = torch.utils.data.DataLoader(torch.arange(5), batch_size=1, shuffle=True)
        seen: list[int] = []

        def evaluate(here: str) -> None:
            if here == evaluate_in:
                with loop.evaluation():
                    assert sorted(int(batch) for batch in data) == [0, 1, 2, 3, 4]
                    torch.rand(()), np.random.rand()

        with everstep.TrainLoop(tmp_path / name, {"a": []}, max_epoch=4, steps_per_epoch=3) as loop:
            for _ in loop.iter_epochs():
                for _, batch in loop.iter_steps(data):
                    seen.append(int(batch))
                    evaluate("steps")
                evaluate("tail")
                seen.append(int(1e6 * float(torch.rand(()))))
        return seen

    assert train("with", where) == train("without", "")


def test_several_reasons_to_save_at_one_step_are_one_checkpoint(tmp_path: Path) -> None:
    every = everstep.Every(steps=2) | everstep.At(4) | everstep.Every(epochs=1)
    announced: list[str] = []
    tiny = Tiny(tmp_path / "run", max_epoch=1, services=[everstep.Checkpoints(every, keep_last=None)])
    tiny.loop.on(
        everstep.services.Moment.AFTER_CHECKPOINT, lambda boundary: announced.append(boundary.payload)
    )
    tiny.train(inside=lambda loop, step: loop.make_checkpoint())
    written = Counter(event["name"] for event in events(tmp_path / "run", "checkpoint"))
    assert set(written.values()) == {1}
    assert set(announced) <= written.keys()
    assert {*(f"step-0000000{step}" for step in (1, 2, 3)), "epoch-0001-step-00000004"} < written.keys()


def test_without_a_console_lines_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with everstep.TrainLoop(tmp_path / "run", max_epoch=1, default_services=False, show_eta=False) as loop:
        for _ in loop.iter_epochs():
            for _ in loop.iter_steps([1.0]):
                loop.collect_metrics(loss=0.5)
                loop.println("hello", with_tag=True)
            loop.print_logs()
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "[Step 1] hello"
    assert out[1].startswith("[Step 1] loss: 0.5; epoch time: ")
    assert out[2] == "ended: max_epoch 1 is reached (step 1, finished)"


def train_linear(run: Path, names: str, *, step: bool = True) -> None:
    """The state has a share of these: model, second (of which `optimizer` has parameters, too), optimizer."""
    model, second = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    trained = [*model.parameters(), *(second.parameters() if "two" in names else ())]
    entries = {"model": model, "second": second, "optimizer": torch.optim.SGD(trained, lr=0.1)}
    state = {name: entries[name] for name in names.split() if name != "two"}
    with everstep.TrainLoop(run, state, max_epoch=2) as loop:
        for _ in loop.iter_epochs():
            for _, batch in loop.iter_steps([torch.ones(1, 2)] * 3):
                model(batch).sum().backward()
                if step:
                    entries["optimizer"].step()


def test_an_optimizer_that_never_steps_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProgressError, match=r"3 steps .* call optimizer\.step\(\)"):
        train_linear(tmp_path / "run", "model optimizer", step=False)


LACKING: dict[str, str] = {
    "model": r"SGD .* add it",
    "": "SGD of arrays that are not in the state",
    "optimizer": r"parameter 0 \(1, 2\) of 'optimizer'.* add the model",  # else old moments of a new model
    "two model optimizer": r"parameter 2 \(1, 2\) of 'optimizer'.* add the model",
}


@pytest.mark.parametrize(("names", "message"), LACKING.items())
def test_an_optimizer_that_the_state_lacks_is_an_error(tmp_path: Path, names: str, message: str) -> None:
    with pytest.raises(StateError, match=message):
        train_linear(tmp_path / "run", names)
