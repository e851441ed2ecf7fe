"""Modules and scalers that the steps change and that `state` does not save are named; others are not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torchmetrics import MeanMetric, MetricCollection

import everstep
from everstep.backends.torch.given_values import mark_of, same


def scaled(scaler: torch.amp.GradScaler) -> None:
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()


KINDS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any, nn.Module, int], Any]]] = {
    "MeanMetric": (lambda model: MeanMetric(), lambda made, model, step: made.update(step)),
    "MetricCollection": (
        lambda model: MetricCollection({"a": MeanMetric(), "b": MeanMetric()}),
        lambda made, model, step: made.update(step),
    ),
    "AveragedModel": (
        AveragedModel,
        lambda made, model, step: made.update_parameters(model) if step % 4 == 0 else None,
    ),
    "GradScaler": (
        lambda model: torch.amp.GradScaler("cpu", growth_interval=2),
        lambda made, model, step: scaled(made),
    ),
}


def warnings(
    run_dir: Path,
    state: dict[str, Any],
    step_of: Callable[[int], Any],
    tail: Callable[[Any], Any] = lambda loop: None,
) -> list[str]:
    """What a run says of modules outside its state; `step_of` is part of each step, `tail` of each tail."""
    model, data = state["model"], everstep.data.arrays(torch.ones(8, 2), batch_size=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with everstep.TrainLoop(run_dir, {**state, "optimizer": optimizer}, max_epoch=3) as loop:
        for _ in loop.iter_epochs():
            for step, (x,) in loop.iter_steps(data):
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                step_of(step)
            tail(loop)
    return [text for text in loop.ending.warnings if "the state does not save it" in text]


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_that_the_steps_change_is_named_once_unless_the_state_saves_it(
    kind: str, tmp_path: Path
) -> None:
    make, change = KINDS[kind]
    model = nn.Linear(2, 1)
    made = make(model)
    step: Callable[[int], Any] = lambda step: change(made, model, step)  # noqa: E731
    (said,) = warnings(tmp_path / "lacks it", {"model": model}, step)
    assert said.startswith(f"{kind}: ")
    assert warnings(tmp_path / "saves it", {"model": model, "made": {"all": [made]}}, step) == []


def test_what_evaluations_and_tails_change_is_not_named(tmp_path: Path) -> None:
    model, inside, after = nn.Linear(2, 1), MeanMetric(), MeanMetric()

    def tail(loop: Any) -> None:
        after.update(1.0)
        with loop.evaluation():
            inside.update(1.0)

    frozen = nn.BatchNorm1d(2).eval()
    assert warnings(tmp_path / "run", {"model": model}, lambda step: frozen(torch.ones(2, 2)), tail) == []


def test_what_is_collected_while_it_is_compared_has_not_changed() -> None:
    """Models of earlier runs in a notebook, say, which the collector of garbage finds just then."""
    weight = torch.ones(1)
    first, second = mark_of(weight), mark_of(weight)
    weight.add_(1)
    third = mark_of(weight)
    assert same(first, second) and not same(second, third)
    del weight
    assert same(first, second) and not same(second, third)


class Pole:
    """As an environment of gymnasium: no state dict, and each step reads what the steps before have left."""

    angle = 0.0


class Agent(nn.Linear):
    def __init__(self, pole: Pole) -> None:
        super().__init__(2, 1)
        self.pole = pole


class SavedPole:
    def __init__(self, pole: Pole) -> None:
        self.pole = pole

    def state_dict(self) -> dict[str, float]:
        return {"angle": self.pole.angle}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.pole.angle = state["angle"]


def test_an_environment_that_the_network_holds_is_named_with_a_remedy_that_can_be_followed(
    tmp_path: Path,
) -> None:
    pole = Pole()
    agent = Agent(pole)

    def fall(step: int) -> None:
        pole.angle += 0.1 * step

    (said,) = warnings(tmp_path / "forgot", {"model": agent}, fall)
    assert said.startswith("model.pole.angle: ") and "later steps or the epoch's tail may read it" in said
    assert "or add what changes inside it" in said, "the object itself cannot be added"
    assert warnings(tmp_path / "saved", {"model": agent, "pole": SavedPole(pole)}, fall) == []


class Broken(nn.Module):
    def modules(self) -> Any:
        raise RuntimeError("of its own")


def test_a_module_that_fails_when_it_is_looked_at_stops_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Broken()
    assert warnings(tmp_path / "run", {"model": nn.Linear(2, 1)}, lambda step: None) == []
    assert capsys.readouterr().out.count("were not checked (RuntimeError: of its own)") == 1
    assert isinstance(broken, nn.Module)


def test_entries_that_come_to_share_an_array_are_named_in_each_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An optimizer begun with another's state, weights kept as the best: a resume gives one array to each."""

    def train(max_step: int, copied: bool, run_dir: str) -> list[str]:
        model = nn.Linear(2, 1)
        first, second = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in range(2))
        best = everstep.Slot(None)
        state = {"model": model, "tied": model.weight, "first": first, "second": second, "best": best}
        with everstep.Supervisor(tmp_path / run_dir, state, seed=1, max_step=max_step) as sv:
            while not sv.should_stop():
                first.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                first.step()
                if sv.step == 1:
                    handed = [first.state_dict(), model.state_dict()]
                    handed = copy.deepcopy(handed) if copied else handed
                    second.load_state_dict(handed[0])
                    best.value = handed[1]
                sv.advance()
        said = "".join(capsys.readouterr())
        return [line for line in said.splitlines() if "have come to share" in line]

    assert not train(3, True, "copied") + train(6, True, "copied")
    model_and_best, optimizers = sorted(train(3, False, "shared"), key=len)
    assert "'first' and 'second'" in optimizers and "momentum_buffer" in optimizers
    assert "'model' and 'best'" in model_and_best and "best/value/weight" in model_and_best
    assert not train(6, False, "shared"), "restored, each has its own"
