"""What training makes of its objects, where a second loop of the process goes on with them.

A notebook's cell is run again, or `Retry` opens the run again.  What training has set is not what the program
gave: a later process, whose program gives the same as ever, must find all of it in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from tiny_runs import Boom

pytestmark = pytest.mark.usefixtures("one_thread")

CHANGED_AT, STEPS = 9, 24
SAMPLES = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("shift", None)
        self.register_buffer("full", torch.ones(2))
        self.gain = 2.0

    def forward(self, x: torch.Tensor) -> Any:
        x = self.last(self.norm(self.first(x))) * vars(self).get("scale", 1.0) * vars(self).get("gain", 1.0)
        x = x if self.shift is None else x + self.shift
        return self.frozen(x if self.full is None else x * self.full)


CHANGES: dict[str, Callable[[Net], object]] = {
    "evaluating": lambda net: net.norm.eval(),
    "frozen": lambda net: net.first.requires_grad_(False),
    "thawed": lambda net: net.frozen.requires_grad_(True),
    "a new attribute": lambda net: setattr(net, "scale", 0.5),
    "another value": lambda net: setattr(net, "gain", 0.5),
    "a deleted attribute": lambda net: delattr(net, "gain"),
    "a filled buffer": lambda net: setattr(net, "shift", torch.full((2,), 0.3)),
    "an emptied buffer": lambda net: setattr(net, "full", None),
}


def made() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.Adam(net.parameters(), lr=0.01)


def train(folder: Path, objects: Any, change: str, fails_at: int = 0, inside: bool = False) -> Any:
    net, optimizer = objects
    data = everstep.data.arrays(SAMPLES, batch_size=8, shuffle=True)
    saves = everstep.Checkpoints(everstep.Every(steps=4))
    state = {"net": {"a": net} if inside else net, "optimizer": optimizer}
    with everstep.TrainLoop(folder, state, max_epoch=STEPS // 8, seed=1, services=[saves]) as loop:
        net.criterion = torch.square  # type: ignore[assignment]  # set by each start, before it resumes
        for _ in loop.iter_epochs():
            for step, (x,) in loop.iter_steps(data):
                if step == CHANGED_AT:
                    CHANGES[change](net)
                if step == fails_at:
                    raise Boom
                optimizer.zero_grad()
                loss = net.criterion(net(x)).mean()
                loss.backward()
                optimizer.step()
                loop.collect_metrics(loss=loss)
    return loop.ending.digest, [p.tolist() for p in net.parameters()], loop.ending.diverged


SAVED = [(11,), (11, 18), (15, 18), (15, 18, 20)]
"""The first failure is before or after a save of the change; the last start has objects of its own."""
DEEP = [(change, SAVED[2], True) for change in ("evaluating", "frozen", "a filled buffer")]


@pytest.mark.parametrize(
    ("change", "failures", "inside"),
    [*((name, each, False) for name in CHANGES for each in SAVED), *DEEP],
    ids=str,
)
def test_a_later_process_finds_what_training_made(tmp_path: Path, change, failures, inside) -> None:
    """Of a model, or of one inside a dictionary."""
    expected = train(tmp_path / "whole", made(), change, inside=inside)
    objects = made()
    for fails_at in failures:
        with pytest.raises(Boom):
            train(tmp_path / "run", objects, change, fails_at, inside)
    if len(failures) > 1:
        objects = made()
    assert train(tmp_path / "run", objects, change, inside=inside) == expected


def test_what_another_run_left_and_the_program_gives_again_is_given(tmp_path: Path) -> None:
    """The first run's training freezes a layer, and the program gives it frozen to the second run."""

    def second(objects: Any, fails_at: int = 0) -> Any:
        objects[0].first.requires_grad_(False)
        return train(tmp_path / "second", objects, "evaluating", fails_at)

    first, alone = made(), made()
    train(tmp_path / "first", first, "frozen")
    with pytest.raises(Boom):
        second(first, 14)
    assert second(alone)[2] is None and not alone[0].norm.training


def test_a_setting_of_a_layer_that_is_no_number_any_more_stays(tmp_path: Path) -> None:
    objects = made()
    with pytest.raises(Boom):
        train(tmp_path / "run", objects, "frozen", 7)
    objects[0].norm.momentum = None
    train(tmp_path / "run", objects, "frozen")
    assert objects[0].norm.momentum is None


def test_a_flag_that_training_set_is_found_where_the_program_sets_another_one(tmp_path: Path) -> None:
    """Training freezes a layer; before the second loop, and at later starts, the program freezes another."""

    def again(objects: tuple[Net, torch.optim.Optimizer], fails_at: int) -> None:
        objects[0].last.requires_grad_(False)
        with pytest.raises(Boom):
            train(tmp_path, objects, "frozen", fails_at)

    objects, later = made(), made()
    with pytest.raises(Boom):
        train(tmp_path, objects, "frozen", 15)
    again(objects, 19)
    again(later, 20)
    assert not later[0].first.weight.requires_grad
