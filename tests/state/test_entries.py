"""Entries: each kind of object is restored in place, and what does not fit is refused beforehand."""

import random
from collections import Counter, OrderedDict, deque
from random import SystemRandom as Unseeded
from typing import Any

import numpy as np
import pytest
import torch

from everstep.errors import RestoreError, StateError
from everstep.state import Slot, decode, dropped, encode, make_entry


def saved(obj: Any) -> Any:
    """What a checkpoint would give back of `obj` now."""
    return decode(encode(make_entry("x", obj).save()))


class Meter:
    """A user's own stateful object."""

    def __init__(self) -> None:
        self.history: list[Any] = []

    def state_dict(self) -> Any:
        return {"history": self.history}

    def load_state_dict(self, state: Any) -> None:
        self.history = state["history"]


def test_a_value_given_to_a_slot_later_counts_as_the_first() -> None:
    slot, window = Slot(), deque([1])
    slot.value = window
    entry = make_entry("slot", slot)
    entry.load({"value": deque([2]), "replaced": False})
    assert window == deque([2]) and slot.value is window
    slot.value += [3]
    assert entry.save() == {"value": deque([2, 3]), "replaced": False}
    slot.value = deque()
    assert entry.save()["replaced"]


def test_keys_that_a_checkpoint_lacks_are_named_before_they_go() -> None:
    live = {"n": 0, "k": 5, "inner": {"a": 1, "b": 2}, "list": [1, 2]}
    tree = {"n": 1, "inner": {"a": 3}, "list": [1], "new": 4}
    entry = make_entry("d", live)
    assert dropped(entry, tree) == ["k", "inner/b"]
    entry.load(tree)
    assert live == tree and dropped(entry, tree) == []
    assert dropped(make_entry("a", np.zeros(1)), tree) == []


@pytest.mark.parametrize("other", [None, 3, "x", [1], {}, {"a": 1}, np.zeros(2), torch.zeros(2)])
@pytest.mark.parametrize(
    "make",
    [
        lambda: random.Random(1),
        lambda: np.random.default_rng(1),
        lambda: np.random.RandomState(1),
        torch.Generator,
        lambda: torch.nn.Linear(2, 3),
        lambda: torch.optim.SGD(torch.nn.Linear(2, 3).parameters(), lr=0.1),
        lambda: np.zeros(5),
        lambda: torch.zeros(5),
    ],
)
def test_a_state_of_something_else_is_refused(make: Any, other: Any) -> None:
    entry = make_entry("x", make())
    before = repr(entry.save())
    assert any(entry.check(other))
    with pytest.raises(RestoreError, match="does not fit"):
        entry.load(other)
    assert repr(entry.save()) == before


def test_an_array_of_another_shape_or_dtype_is_refused_and_inexact_ones_are_guarded() -> None:
    array = np.arange(4.0)
    entry = make_entry("a", array)
    for other in (np.zeros(3), np.zeros(4, np.float32), [0, 1], None):
        (reshaped,) = entry.check(other).reshaped
        assert "-> float64 (4,)" in reshaped
        with pytest.raises(RestoreError, match="reshaped"):
            entry.load(other)
    assert array.tolist() == [0, 1, 2, 3]
    assert entry.guarded(()) and not make_entry("a", np.zeros(1, int)).guarded(())


@pytest.mark.parametrize(
    "make",
    [
        lambda: random.Random(5),
        lambda: np.random.default_rng(5),
        lambda: np.random.Generator(np.random.MT19937(5)),
        lambda: np.random.Generator(np.random.Philox(5)),
        lambda: np.random.RandomState(5),
        lambda: torch.Generator().manual_seed(5),
    ],
)
def test_generators_go_on_where_they_were(make: Any) -> None:
    def draw(generator: Any) -> Any:
        if isinstance(generator, torch.Generator):
            return torch.randn(3, generator=generator).tolist()
        if isinstance(generator, random.Random):
            return [generator.gauss(0, 1), generator.random()]
        return generator.standard_normal(3).tolist()

    generator = make()
    draw(generator)
    tree = saved(generator)
    expected = [draw(generator) for _ in range(3)]
    other = make()
    for _ in range(7):
        draw(other)
    entry = make_entry("g", other)
    assert not any(entry.check(tree)) and not entry.guarded(())
    entry.load(tree)
    assert [draw(other) for _ in range(3)] == expected


def test_a_numpy_generator_goes_on_spawning() -> None:
    generator = np.random.default_rng(5)
    generator.spawn(2)
    tree = saved(generator)
    (expected,) = generator.spawn(1)
    other = np.random.default_rng(99)
    entry = make_entry("g", other)
    entry.load(tree)
    assert other.spawn(1)[0].random() == expected.random()
    tree = saved(np.random.Generator(np.random.MT19937(5)))
    assert entry.check(tree).reshaped == ["bit generator MT19937 -> bit generator PCG64"]


def test_a_dict_and_what_is_in_it_stay_the_same_objects() -> None:
    array, tensor, inner = np.zeros(2), torch.zeros(2), [1, 2]
    config: dict[Any, Any] = {"a": array, "t": tensor, "list": inner, "best": 0.5, 3: (1,)}
    tree = saved(config)
    array += 1
    tensor += 1
    inner.append(3)
    config["late"] = "gone again"
    config["best"] = None
    make_entry("config", config).load(tree)
    assert list(config) == ["a", "t", "list", "best", 3]
    assert config["a"] is array and array.tolist() == [0, 0]
    assert config["t"] is tensor and tensor.tolist() == [0, 0]
    assert config["list"] is inner and inner == [1, 2]
    assert config["best"] == 0.5 and config[3] == (1,)


def test_what_in_a_dict_changed_its_kind_or_shape_is_replaced() -> None:
    config: dict[str, Any] = {"grown": np.zeros(2), "kind": None, "list": [], "frozen": np.zeros(2)}
    config["frozen"].flags.writeable = False
    tree = {"grown": np.ones(3), "kind": [1], "list": {"now": "a dict"}, "frozen": np.ones(2)}
    entry = make_entry("config", config)
    assert not any(entry.check(tree))
    entry.load(tree)
    assert config["grown"].tolist() == [1, 1, 1]
    assert config["kind"] == [1] and config["list"] == {"now": "a dict"}
    assert config["frozen"].tolist() == [1, 1]


def test_a_list_is_restored_in_place() -> None:
    rows: list[Any] = [1, np.zeros(1), [2]]
    tree = saved(rows)
    alias, array = rows, rows[1]
    rows[1] += 1
    rows.extend([4, 5])
    make_entry("rows", rows).load(tree)
    assert alias == [1, array, [2]] and array.tolist() == [0]


def test_dicts_of_other_kinds_keep_theirs() -> None:
    ordered, counter = OrderedDict(b=1, a=2), Counter({3: 2})
    trees = [saved(ordered), saved(counter)]
    ordered.clear()
    counter[3] += 5
    make_entry("o", ordered).load(trees[0])
    make_entry("c", counter).load(trees[1])
    assert list(ordered.items()) == [("b", 1), ("a", 2)]
    assert counter == Counter({3: 2}) and type(counter) is Counter


def test_models_and_generators_inside_containers_are_entries_too() -> None:
    def build() -> dict[str, Any]:
        return {"nets": [torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)], "rng": random.Random(1), "n": 1}

    one, two = build(), build()
    tree = saved(one)
    entry = make_entry("all", two)
    net = two["nets"][0]
    entry.load(tree)
    assert two["nets"][0] is net and torch.equal(net.weight, one["nets"][0].weight)
    assert two["rng"].random() == one["rng"].random()
    assert entry.guarded(("nets", 0, "weight"))
    assert not entry.guarded(("n",))

    tree["nets"][1] = {"weight": torch.zeros(1, 3), "odd": torch.zeros(1)}
    del tree["rng"]
    found = entry.check(tree)
    assert found.missing == ["nets/1/bias", "rng"]
    assert found.unexpected == ["nets/1/odd"]
    assert found.reshaped == ["nets/1/weight (1, 3) float32 -> (1, 2) float32"]
    with pytest.raises(RestoreError) as caught:
        entry.load(tree)
    assert caught.value.missing == ("nets/1/bias", "rng")


def test_a_container_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(StateError, match="contains itself"):
        make_entry("x", loop).save()


class OnlySaves:
    def state_dict(self) -> Any:
        return {}


READ_ONLY = np.zeros(2)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (3, r"bare int \(3\).*Slot\(value\), or in a dict"),
        ("text", "bare str"),
        ((1, 2), "bare tuple"),
        (None, "bare NoneType"),
        ({1, 2}, "bare set"),
        (np.float32(1), "bare float32"),
        (Meter, "is the class Meter: pass an instance"),
        (OnlySaves(), r"OnlySaves, which cannot be saved: give it state_dict\(\) and load_state_dict"),
        (
            type("Cart", (), {"__module__": "gymnasium.envs"})(),
            "as in docs/recipes/reinforcement_learning.md",
        ),
        (object(), "what can be saved: objects with state_dict"),
        (lambda: 1, "function"),
        (Unseeded(), r"random.Random\(seed\)"),
        (READ_ONLY, "read-only.*Slot"),
        (np.array([None]), "Python objects"),
        (np.ma.array([1.0]), "MaskedArray"),
        (torch.ones(1, requires_grad=True) * 2, r"tensor.detach\(\)"),
        (torch.nn.LazyLinear(2), "'weight' of a lazy module.*run one batch"),
        (torch.nn.parameter.UninitializedParameter(), "run one batch"),
    ],
    ids=lambda v: v[:12] if isinstance(v, str) else type(v).__name__,
)
def test_what_cannot_be_an_entry_is_named_with_the_remedy(value: Any, says: str) -> None:
    with pytest.raises(StateError, match="state entry 'thing'.*" + says):
        make_entry("thing", value)
