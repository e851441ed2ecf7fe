"""What a newcomer gets wrong without noticing: each is an error or a warning that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep import Best, Checkpoints, EarlyStop
from everstep.errors import ProgressError, UsageError
from tiny_runs import Boom, Tiny


def collecting(**values: float) -> Any:
    """A tail that collects these; more metrics come as more keywords."""
    return lambda loop, epoch: loop.collect_metrics({name: value / epoch for name, value in values.items()})


@pytest.mark.parametrize("given", [[Best("valid_loss")], [Best("valid_loss"), Best("valid_acc", save=False)]])
def test_a_watched_metric_is_the_runs_best_beside_other_best_services(tmp_path: Path, given: Any) -> None:
    def tail(loop: Any, epoch: int) -> None:
        collecting(valid_loss=1.0, valid_acc=0.5)(loop, epoch)
        loop.print_logs()

    tiny = Tiny(tmp_path / "run", max_epoch=2, watch=("valid_acc", "max"), services=given).train(tail=tail)
    assert tiny.loop.best_valid_metric == 0.5 and tiny.loop.ending.best.metric == "valid_acc"
    first = next(line for line in tiny.lines if "valid acc" in line)
    assert first.count(" (*)") == 2
    assert (tmp_path / "run" / "best" / "valid_loss").is_dir()


WATCHING = {
    "early stop": {"services": [EarlyStop("val_loss", patience=1)]},
    "best": {"services": [Best("val_loss")]},
    "watch": {"watch": "val_loss"},
    "keep_best": {"services": [Checkpoints(keep_best=("val_loss", "min", 2))]},
    "all": {"watch": "val_loss", "services": [EarlyStop("val_loss", patience=1)]},
}


@pytest.mark.parametrize("arguments", WATCHING.values(), ids=WATCHING)
def test_a_name_like_a_collected_one_is_said_after_the_first_epoch(tmp_path: Path, arguments: Any) -> None:
    tiny = Tiny(tmp_path / "run", max_epoch=3, **arguments)
    told = []

    def tail(loop: Any, epoch: int) -> None:
        told.append(any("no value of" in line for line in tiny.lines))
        loop.collect_metrics(valid_loss=1 / epoch, train_loss=1.0)

    (warning,) = tiny.train(tail=tail).loop.ending.warnings
    assert warning.endswith(": no value of 'val_loss'; did you mean 'valid_loss'?")
    assert told == [False, True, True]
    assert tiny.lines.count(f"warning: {warning}") == 1


def test_a_name_like_no_other_is_said_at_the_end_of_each_start_that_trains(tmp_path: Path) -> None:
    services = [EarlyStop("nope", "min", patience=1, name="stopper")]
    wanted = ("'stopper': no value of 'nope'; known: loss, valid_loss",)
    for max_epoch, warnings in ((2, wanted), (3, wanted), (3, ())):
        tiny = Tiny(tmp_path / "run", max_epoch=max_epoch, services=services)
        assert tiny.train(tail=collecting(valid_loss=1.0)).loop.ending.warnings == warnings


def test_a_checkpoint_is_not_ranked_by_a_value_that_is_older_than_it(tmp_path: Path) -> None:
    found = {1: 0.1, 3: 0.5}

    def tail(loop: Any, epoch: int) -> None:
        if epoch in found:
            loop.collect_metrics(valid_loss=found[epoch])

    for max_epoch in (2, 5):
        saves = Checkpoints(everstep.Every(epochs=1), keep_last=1, keep_best=("valid_loss", "min", 2))
        Tiny(tmp_path, max_epoch=max_epoch, services=[saves]).train(tail=tail)
    kept = {path.name.partition("-step")[0] for path in (tmp_path / "checkpoints").glob("epoch-*")}
    assert kept == {"epoch-0001", "epoch-0003", "epoch-0005"}


@pytest.mark.parametrize("services", [[], [EarlyStop("loss", patience=9)]])
def test_what_nobody_asked_for_or_comes_in_steps_is_not_missed(tmp_path: Path, services: Any) -> None:
    tiny = Tiny(tmp_path / "run", max_epoch=2, services=services).train(tail=collecting(valid_los=1.0))
    assert tiny.loop.ending.warnings == ()


def test_nothing_to_restore_is_said(tmp_path: Path) -> None:
    services = [Best("val_acc", restore_at_end=True)]
    tiny = Tiny(tmp_path / "run", max_epoch=1, services=services).train()
    assert tiny.loop.ending.warnings == (
        "'best val_acc': no value of 'val_acc'; known: loss",
        "'best val_acc': restore_at_end restored nothing: there is no value of it; the last weights stay",
    )


class Net:
    """The smallest training with torch: weights, their optimizer, one update."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def train(self, run_dir: Path, body: Callable[[Any], object]) -> everstep.TrainLoop:
        """One epoch of two steps, and then `body`."""
        with everstep.TrainLoop(run_dir, self.state, max_epoch=1) as loop:
            for _ in loop.iter_epochs():
                for _ in loop.iter_steps([1, 2]):
                    self.update()
                body(loop)
        return loop

    def update(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 1)).sum().backward()
        self.optimizer.step()


def test_an_epoch_that_trains_without_iter_steps_is_an_error(tmp_path: Path) -> None:
    net = Net()
    wanted = r"in epoch 1 .* made 3 updates and no step was counted; .*loop\.iter_steps\(data\)"

    def without_steps() -> None:
        with everstep.TrainLoop(tmp_path / "run", net.state, max_epoch=2) as loop:
            for _ in loop.iter_epochs():
                for _ in range(3):
                    net.update()

    with pytest.raises(ProgressError, match=wanted):
        without_steps()


def test_an_optimizer_step_inside_evaluation_is_an_error(tmp_path: Path) -> None:
    net = Net()

    def trains(loop: Any, error: Any = None) -> None:
        with loop.evaluation(grad=True):
            net.update()
            if error:
                raise error

    with pytest.raises(Boom):
        net.train(tmp_path / "boom", lambda loop: trains(loop, Boom()))
    with pytest.raises(UsageError, match=r"inside evaluation\(\) \(2 updates before the block, 3 after\)"):
        net.train(tmp_path / "run", trains)


def test_a_second_step_loop_over_other_data_is_said_once(tmp_path: Path) -> None:
    train, valid = [1, 2, 3], [4]
    for max_epoch in (2, 3):
        tiny = Tiny(tmp_path / "run", max_epoch=max_epoch)
        with tiny.loop as loop:
            for _ in loop.iter_epochs():
                for _ in loop.iter_steps(train):
                    pass
                for _ in loop.iter_steps(valid):
                    pass
        (warning,) = loop.ending.warnings
        assert "reads other data as stream 'train': its steps count as training steps" in warning
        assert "with loop.evaluation(): for x, y in valid:" in warning and 'name="train2"' in warning


def test_data_made_anew_or_read_twice_or_named_is_no_second_data(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path / "run", max_epoch=4)
    with tiny.loop as loop:
        for epoch in loop.iter_epochs():
            train = [epoch, epoch + 1]
            for _ in range(2):
                for _ in loop.iter_steps(train):
                    pass
            for _ in loop.iter_steps([epoch], name="other"):
                pass
    assert loop.step == 20 and loop.ending.warnings == ()
