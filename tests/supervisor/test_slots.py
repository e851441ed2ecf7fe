"""A value in a `Slot`, changed in place through another name or replaced, survives a kill either way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep.state import Slot
from tiny_runs import Boom, boom_at


class Program:
    """Training that depends on `value` by its own name; `change(slot, value, step)` is its step."""

    def __init__(self, run_dir: Path, make: Callable[[], Any], change: Any, state: Any = None) -> None:
        self.value = make()
        self.slot = Slot(self.value)
        self.run_dir, self.change, self.seen = run_dir, change, dict[int, Any]()
        self.state = {"slot": self.slot} if state is None else state(self.slot)

    def train(self, stop_at: int = 0) -> Program:
        saves = everstep.Checkpoints(everstep.Every(steps=1), keep_last=None)
        data = everstep.data.arrays(np.arange(8), batch_size=2, shuffle=True)
        with everstep.TrainLoop(
            self.run_dir, self.state, max_epoch=2, seed=3, services=[saves], default_services=False
        ) as loop:
            for _epoch in loop.iter_epochs():
                for step, _ in loop.iter_steps(data):
                    self.change(self.slot, self.value, step)
                    boom_at(stop_at)(loop, step)
                    self.seen[step] = (repr(self.slot.value), repr(self.value))
        self.digest = loop.ending.digest
        return self


def add_to_dict(slot: Slot, value: Any, step: int) -> None:
    value[step % 3] = value.get(step % 3, 0) + step


MUTATED: dict[str, tuple[Callable[[], Any], Any]] = {
    "deque": (lambda: deque([0], maxlen=3), lambda slot, value, step: value.append(step)),
    "list": (list, lambda slot, value, step: value.append((step, value[-1:]))),
    "dict": (dict, add_to_dict),
    "nested": (lambda: {"window": deque()}, lambda slot, value, step: value["window"].append(step)),
    "set": (set, lambda slot, value, step: value.add(step * step % 11)),
    "bytearray": (bytearray, lambda slot, value, step: value.append(step)),
    "array": (lambda: np.zeros(2), lambda slot, value, step: value.__iadd__(step)),
    "tensor": (lambda: torch.zeros(2), lambda slot, value, step: value.add_(step)),
}


@pytest.mark.campaign("long", gate=4)
@pytest.mark.parametrize(("make", "change"), MUTATED.values(), ids=MUTATED)
@pytest.mark.parametrize("nested", [False, True], ids=["entry", "inside a dict"])
def test_what_is_changed_in_place_is_restored_in_place(
    tmp_path: Path, make: Any, change: Any, nested: bool
) -> None:
    state = (lambda slot: {"all": {"slot": slot, "n": 1}}) if nested else None
    straight = Program(tmp_path / "straight", make, change, state).train()
    for stop_at in (3, 6):
        with pytest.raises(Boom):
            Program(tmp_path / "run", make, change, state).train(stop_at)
    resumed = Program(tmp_path / "run", make, change, state).train()
    assert resumed.slot.value is resumed.value
    assert resumed.seen.items() <= straight.seen.items() and 8 in resumed.seen
    assert resumed.digest == straight.digest


def replace(slot: Slot, value: Any, step: int) -> None:
    slot.value = [*slot.value, step - len(value)]


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: [7], replace),
        (lambda: np.float64(2.5), lambda slot, value, step: setattr(slot, "value", 2.5)),
    ],
)
def test_what_is_replaced_leaves_the_first_value_alone(tmp_path: Path, make: Any, change: Any) -> None:
    straight = Program(tmp_path / "straight", make, change).train()
    for stop_at in (2, 7):
        with pytest.raises(Boom):
            Program(tmp_path / "run", make, change).train(stop_at)
    resumed = Program(tmp_path / "run", make, change).train()
    assert resumed.seen.items() <= straight.seen.items() and 8 in resumed.seen
    assert resumed.digest == straight.digest


def test_a_value_given_later_counts_as_the_first() -> None:
    slot, window = Slot(), deque([1])
    slot.value = window
    entry = everstep.state.make_entry("slot", slot)
    entry.load({"value": deque([2]), "replaced": False})
    assert window == deque([2]) and slot.value is window
    slot.value += [3]
    assert entry.save() == {"value": deque([2, 3]), "replaced": False}
    slot.value = deque()
    assert entry.save()["replaced"]


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("place", ["before the loop", "at the head"])
@pytest.mark.parametrize("stop_at", [2, 4, 7])
def test_a_value_that_is_assigned_where_lines_run_again_keeps_its_name(
    tmp_path: Path, place: str, stop_at: int
) -> None:
    def train(run_dir: Path, stop_at: int = 0) -> list[int]:
        slot = Slot() if place == "before the loop" else Slot([])
        saves = everstep.Checkpoints(everstep.Every(steps=1))
        with everstep.TrainLoop(run_dir, {"slot": slot}, max_epoch=2, seed=3, services=[saves]) as loop:
            slot.value = values = []
            for _ in loop.iter_epochs():
                if place == "at the head":
                    slot.value = values = []
                for step, _ in loop.iter_steps([1, 2, 3, 4]):
                    values.append(step)
                    boom_at(stop_at)(loop, step)
            assert slot.value is values
        return values

    straight = train(tmp_path / "straight")
    with pytest.raises(Boom):
        train(tmp_path / "run", stop_at)
    assert train(tmp_path / "run") == straight
