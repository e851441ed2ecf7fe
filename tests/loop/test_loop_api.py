"""Every documented name of the seed's TrainLoop, as its users expect it to work."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep.errors import ConfigError, UsageError
from everstep.testing import ManualClock

Make = Callable[..., everstep.TrainLoop]


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def make(tmp_path: Path, lines: list[str]) -> Make:
    def made(**arguments: Any) -> everstep.TrainLoop:
        services = [*arguments.pop("services", ()), everstep.services.Console(sink=lines.append)]
        return everstep.TrainLoop(tmp_path / "run", services=services, **arguments)

    return made


def test_the_log_lines(make: Make, lines: list[str]) -> None:
    clock = ManualClock()
    with make(max_epoch=2, clock=clock) as loop:
        loop.on("AFTER_STEP", lambda boundary: None)  # so that the rate is known at each step
        for epoch in loop.iter_epochs():
            for step, batch in loop.iter_steps([1.0, 2.0, 3.0, 4.0]):
                clock.advance(0.5)
                loop.collect_metrics(loss=batch, train_acc=batch / 4)
                if step % 2 == 0:
                    loop.print_logs()
            with loop.evaluation(), loop.timeit("valid_time"):
                clock.advance(2)
                loop.collect_metrics(valid_loss=0.5 * epoch)
            loop.print_logs()
            loop.println("that was an epoch", with_tag=True)
            loop.println("plain")
    assert lines == [
        "[Epoch 1/2, Step 2] loss: 1.5 (±0.5); train acc: 0.375 (±0.125); step time: 0.5s (±0s); ETA 3s",
        "[Epoch 1/2, Step 4] loss: 3.5 (±0.5); train acc: 0.875 (±0.125); step time: 0.5s (±0s); ETA 2s",
        "best valid_loss: smaller is better (inferred from its name)",
        "[Epoch 1/2, Step 4] loss: 2.5 (±1.11803); valid loss: 0.5 (*); train acc: 0.625 (±0.279508); "
        "epoch time: 4s; step time: 0.5s (±0s); valid time: 2s; ETA 4s",
        "[Epoch 1/2, Step 4, ETA 4s] that was an epoch",
        "plain",
        "[Epoch 2/2, Step 6] loss: 1.5 (±0.5); train acc: 0.375 (±0.125); step time: 0.5s (±0s); ETA 2.5s",
        "[Epoch 2/2, Step 8] loss: 3.5 (±0.5); train acc: 0.875 (±0.125); step time: 0.5s (±0s); ETA 0.5s",
        "[Epoch 2/2, Step 8] loss: 2.5 (±1.11803); valid loss: 1; train acc: 0.625 (±0.279508); "
        "epoch time: 4s; step time: 0.5s (±0s); valid time: 2s; ETA 0s",
        "[Epoch 2/2, Step 8, ETA 0s] that was an epoch",
        "plain",
        "ended: max_epoch 2 is reached (step 8, finished)",
    ]


def test_flags_inside_and_outside(make: Make) -> None:
    flags = attrgetter("within_epoch", "within_step", "step_data", "epoch", "step")
    with make(max_epoch=1) as loop:
        states = [flags(loop)]
        for _ in loop.iter_epochs():
            states.append(flags(loop))
            states += [flags(loop) for _ in loop.iter_steps(["x", "y"])]
            states.append(flags(loop))
        states.append(flags(loop))
    assert states == [
        (False, False, None, 0, 0),
        (True, False, None, 1, 0),
        (True, True, "x", 1, 1),
        (True, True, "y", 1, 2),
        (True, False, None, 1, 2),
        (False, False, None, 1, 2),
    ]


@pytest.mark.parametrize(
    ("limits", "epochs"),
    [({"max_step": 3}, [[1, 2, 3]]), ({"max_epoch": 2, "steps_per_epoch": 2}, [[1, 2], [3, 4]])],
)
def test_counting_without_data(make: Make, limits: dict[str, int], epochs: list[list[int]]) -> None:
    with make(**limits) as loop:
        assert [list(loop.iter_steps()) for _ in loop.iter_epochs()] == epochs


def test_limits_may_be_set_while_running_and_are_checked(make: Make) -> None:
    with make(max_epoch=9, max_step=99) as loop:
        for name in ("max_step", "max_epoch"):
            for value in (0, -3, 2.5):
                with pytest.raises(ConfigError, match=name):
                    setattr(loop, name, value)
        for epoch in loop.iter_epochs():
            if epoch == 2:
                loop.max_epoch = 3
            for step, _ in loop.iter_steps([1, 2]):
                if step == 3:
                    loop.max_step = 5
    assert (loop.step, loop.epoch) == (5, 3)
    assert (loop.max_step, loop.max_epoch) == (5, 3)


@pytest.mark.parametrize(
    ("first", "then", "ends"),
    [({"max_epoch": 1}, {"max_epoch": 2}, (6, 2)), ({"max_step": 2}, {"max_step": 5}, (5, 2))],
)
def test_a_limit_that_is_raised_when_reached_goes_on(make: Make, first: Any, then: Any, ends: Any) -> None:
    with make(**first) as loop:
        for epoch in loop.iter_epochs():
            list(loop.iter_steps([1, 2, 3]))
            for name, value in then.items() if epoch == 1 else ():
                setattr(loop, name, value)
    assert (loop.step, loop.epoch) == ends


def test_metric_collector_collects_the_weighted_mean(make: Make, lines: list[str]) -> None:
    with make(max_epoch=1, show_eta=False) as loop:
        for _ in loop.iter_epochs():
            list(loop.iter_steps([1]))
            with loop.metric_collector("valid_acc") as acc:
                acc.collect(1.0, weight=3)
                acc.collect(np.float32(0.0))
                assert acc.mean == 0.75
            with loop.metric_collector("nothing"):
                pass
            loop.print_logs()
    assert any(line.startswith("[Step 1] valid acc: 0.75; ") for line in lines)


def test_timeit_records_nothing_if_the_block_raises(make: Make, lines: list[str]) -> None:
    with make(max_epoch=1) as loop:
        for _ in loop.iter_epochs():
            for _ in loop.iter_steps([1]):
                with loop.timeit("load_timer"):
                    pass
                with pytest.raises(ZeroDivisionError), loop.timeit("bad_time"):
                    raise ZeroDivisionError
            loop.print_logs()
    assert any("load timer" in line for line in lines)
    assert not any("bad time" in line for line in lines)


MARKED: list[tuple[list[float], int, list[str]]] = [
    ([0.8, 0.6, 0.7, 0.6, 0.5], 1, ["0.8 (*)", "0.6 (*)", "0.7", "0.6", "0.5 (*)"]),
    ([0.6, 0.8, 0.7, 0.5], 2, ["0.8", "0.7", "0.5 (*)"]),
]


@pytest.mark.parametrize("row", MARKED)
@pytest.mark.parametrize("outside", [False, True])
def test_the_mark_is_on_the_line_of_the_best_alone(make: Make, lines: Any, row: Any, outside: bool) -> None:
    """The mean of the steps, or a value of the tail; what no line has printed is in no later line."""
    values, printed_from, marks = row
    with make(max_epoch=len(values), show_eta=False, watch="loss") as loop:
        for epoch in loop.iter_epochs():
            for _ in loop.iter_steps([1]):
                if not outside:
                    loop.collect_metrics(loss=values[epoch - 1])
            if outside:
                loop.collect_metrics(loss=values[epoch - 1])
            if epoch >= printed_from:
                loop.print_logs()
    parts = [part for line in lines for part in line.partition("] ")[2].split("; ")]
    assert [part.partition(": ")[2] for part in parts if part.startswith("loss: ")] == marks


def test_training_summary(make: Make, lines: list[str], tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"encoder": torch.nn.Linear(3, 4), "head": torch.nn.Linear(4, 1)})
    model["head"].bias.requires_grad_(False)
    scale = np.zeros((2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "scale": scale}
    with make(state=state, seed=5, groups=["model/encoder"], max_epoch=1) as loop:
        loop.print_training_summary()
    environment, table = (line for line in lines if "\n" in line)
    assert environment.startswith("Execution Environment\n---------------------\n")
    facts = dict(line.split(maxsplit=1) for line in environment.splitlines()[2:])
    assert (facts["run"], facts["seed"]) == (str(tmp_path / "run"), "5") and "torch_threads" in facts
    shown = table.splitlines()
    assert shown[0] == "Trainable Parameters (24 in total)" and shown[-1] == "trainable: 24; frozen: 1"
    assert "model/encoder.weight  (4, 3)  12" in shown and "model/head.bias       (1,)     1  frozen" in shown


def test_progress_is_none_without_a_limit(make: Make) -> None:
    with make() as loop:
        for _ in loop.iter_epochs():
            for step, _ in loop.iter_steps([1, 2, 3]):
                assert loop.get_progress() is None and loop.get_eta() is None
                if step == 3:
                    loop.request_stop("enough")


def test_progress_of_each_kind_of_limit(make: Make) -> None:
    progress = []
    with make(max_epoch=2) as loop:
        for _ in loop.iter_epochs():
            progress.append(loop.get_progress())
            progress += [loop.get_progress() for _ in loop.iter_steps([1, 2])]
            progress.append(loop.get_progress())
        progress.append(loop.get_progress())
    assert progress == [0.0, 0.0, 0.25, 0.5, 0.5, 0.5, 0.75, 1.0, 1.0]


OUTSIDE = {
    "iter_steps": lambda loop: loop.iter_steps([1]),
    "collect_metrics": lambda loop: loop.collect_metrics(loss=1.0),
    "print_logs": lambda loop: loop.print_logs(),
    "make_checkpoint": lambda loop: loop.make_checkpoint(),
    "timeit": lambda loop: loop.timeit("a_time").__enter__(),
    "evaluation": lambda loop: loop.evaluation().__enter__(),
    "add_summary": lambda loop: loop.add_summary("x"),
}
ANYWHERE = {
    "iter_epochs": lambda loop: next(loop.iter_epochs()),
    "request_stop": lambda loop: loop.request_stop(),
    "print_training_summary": lambda loop: loop.print_training_summary(),
    "should_stop": lambda loop: loop.should_stop(),
    "loop": lambda loop: loop.loop(1, print),
}


@pytest.mark.parametrize("name", [*OUTSIDE, *ANYWHERE])
def test_use_outside_the_with_block_and_outside_an_epoch(make: Make, name: str) -> None:
    def refused(words: str) -> None:
        with pytest.raises(UsageError, match=rf"{name}\(\) {words}"):
            (OUTSIDE | ANYWHERE)[name](loop)

    loop = make(max_epoch=1)
    refused("before the with block")
    with loop:
        if name in OUTSIDE:
            refused("outside an epoch")
            for _ in loop.iter_epochs():
                list(loop.iter_steps([1]))
            refused("outside an epoch")
    refused("after the with block")


def test_nested_loops(make: Make) -> None:
    with make(max_epoch=1) as loop:
        for _ in loop.iter_epochs():
            with pytest.raises(UsageError, match="one epoch loop at a time"):
                next(loop.iter_epochs())
            for _ in loop.iter_steps([1]):
                with pytest.raises(UsageError, match="one step loop at a time"):
                    loop.iter_steps([2])


def test_what_is_asked_or_registered_at_the_wrong_time(tmp_path: Path) -> None:
    loop = everstep.TrainLoop(tmp_path / "run", max_epoch=1)
    for name in ("resumed", "resumed_mid_epoch", "seed"):
        with pytest.raises(UsageError, match=rf"\.{name} is not known before the loop is entered"):
            getattr(loop, name)
    assert everstep.TrainLoop(tmp_path / "other", seed=3).seed == 3
    with loop:
        assert loop.seed >= 0 and not loop.resumed and not loop.resumed_mid_epoch
        with pytest.raises(UsageError, match="after the with block"):
            _ = loop.ending
        with pytest.raises(UsageError, match="entered before"):
            loop.__enter__()
        with pytest.raises(UsageError, match=r"call_soon\('stop'\): give Stop"):
            loop.call_soon("stop")  # type: ignore[arg-type]
        loop.request_stop()
    with pytest.raises(UsageError, match="after the loop has ended; register it before"):
        loop.on(everstep.services.Moment.AFTER_STEP, print)
    with pytest.raises(UsageError, match="the loop has ended"):
        loop.call_soon(everstep.Stop("late"))
    with pytest.raises(UsageError, match="entered before; make a new one"):
        loop.__enter__()
