"""The suite for state: what the house and its frameworks offer passes, and each rule finds its fault."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep.testing import check_stateful


class Counter:
    """A correct object; each fault below breaks one rule."""

    def __init__(self) -> None:
        self.count, self.total = 0, np.zeros(3)

    def work(self) -> None:
        self.count += 1
        self.total += np.random.rand(3) * self.count

    def state_dict(self) -> Any:
        return {"count": self.count, "total": self.total}

    def load_state_dict(self, state: Any) -> None:
        assert state.keys() == {"count", "total"}
        self.count = state["count"]
        self.total[:] = state["total"]


class Forgets(Counter):
    def state_dict(self) -> Any:
        return {"total": self.total}

    def load_state_dict(self, state: Any) -> None:
        self.total[:] = state["total"]


class ShowsNothing(Counter):
    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


class Rounds(Counter):
    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]
        self.total = state["total"].astype(np.float32).astype(np.float64)


class SavesWithAnEffect(Counter):
    def state_dict(self) -> Any:
        self.count += 1
        return super().state_dict()


class DrawsWhenSaved(Counter):
    def state_dict(self) -> Any:
        np.random.rand()
        return super().state_dict()


class Lenient(Counter):
    def load_state_dict(self, state: Any) -> None:
        self.count = state.get("count", 0)
        self.total[:] = state.get("total", 0)


FAULTS = [
    (ShowsNothing, "mutate"),
    (Forgets, "the restored object differs: total"),
    (Rounds, "not what was saved: total"),
    (SavesWithAnEffect, "twice in a row"),
    (DrawsWhenSaved, "saving it between"),
    (Lenient, "without 'count'"),
]


def test_a_correct_object_passes() -> None:
    check_stateful(Counter, Counter.work)


@pytest.mark.parametrize(("kind", "message"), FAULTS)
def test_each_fault_is_found(kind: type[Counter], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_stateful(kind, kind.work)


def test_leniency_is_allowed_where_it_is_said() -> None:
    check_stateful(Lenient, Lenient.work, strict=False)


def replace(slot: everstep.Slot) -> None:
    slot.value = (slot.value[0] + 1, np.random.rand())


@pytest.mark.parametrize(
    ("make", "mutate"),
    [
        (lambda: np.zeros((2, 3), np.float32), lambda a: a.__iadd__(np.random.rand(2, 3).astype(a.dtype))),
        (lambda: everstep.Slot((0, 0.0)), replace),
        (lambda: {"n": 0, "seen": np.zeros(2)}, lambda d: d.update(n=d["n"] + 1, last=np.random.rand())),
        (lambda: random.Random(3), lambda g: g.gauss(0, 1)),
        (lambda: np.random.default_rng(3), lambda g: g.integers(9, dtype=np.uint32)),
        (lambda: torch.Generator().manual_seed(3), lambda g: torch.randn(3, generator=g)),
    ],
)
def test_built_in_entries_pass(make: Callable[[], Any], mutate: Callable[[Any], object]) -> None:
    # a dict may grow, and a generator's state has a form that nobody edits
    strict = not isinstance(make(), dict | random.Random | np.random.Generator)
    check_stateful(make, mutate, strict=strict)


class Training:
    """A model, its optimizer and its schedule as one object with entries of its own."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)
        )
        self.optimizer = optimizer(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.rand(5, 3)).square().mean().backward()
        self.optimizer.step()
        self.schedule.step()


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    ],
)
def test_a_torch_training_passes(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    whole: dict[int, Training] = {}

    def make() -> dict[str, Any]:
        training = Training(optimizer)
        state = {"model": training.model, "optimizer": training.optimizer, "schedule": training.schedule}
        whole[id(state)] = training
        return state

    check_stateful(make, lambda state: whole[id(state)].step(), strict=False)  # a dict may grow
