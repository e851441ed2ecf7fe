"""Entries: restored in place, refused beforehand where they do not fit; random state; torchmetrics."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from random import SystemRandom as Unseeded
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassPrecision, MulticlassRecall
from torchmetrics.wrappers import MinMaxMetric, Running

import everstep
from everstep.errors import MetricError, RestoreError, StateError
from everstep.metrics.collector import to_scalar
from everstep.state import (
    Slot,
    capture,
    decode,
    encode,
    isolated,
    keys_to_drop,
    make_entry,
    rekey,
    restore,
    seed_all,
)
from tiny_runs import supervised


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
    assert keys_to_drop(entry, tree) == ["k", "inner/b", "list/1"]
    entry.load(tree)
    assert live == tree and keys_to_drop(entry, tree) == []
    assert keys_to_drop(make_entry("a", np.zeros(1)), tree) == []


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


def draw() -> list[Any]:
    return [
        random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item(),
        torch.randn(17).tolist(),
    ]  # fmt: skip


@pytest.mark.parametrize("drawn_before", [0, 1])
def test_every_generator_goes_on_where_it_was(drawn_before: int) -> None:
    for _ in range(drawn_before):
        draw()  # an odd number of gauss draws leaves a second value waiting
    tree = decode(encode(capture()))
    expected = [draw() for _ in range(3)]
    restore(tree)
    assert [draw() for _ in range(3)] == expected


def test_isolated_leaves_no_trace_even_after_an_error() -> None:
    tree = capture()
    expected = draw()
    restore(tree)
    with pytest.raises(KeyError), isolated():
        raise KeyError(draw())
    assert draw() == expected


def test_another_numpy_bit_generator_is_kept() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        tree = decode(encode(capture()))
        expected = np.random.rand(3).tolist()
        restore(tree)
        assert np.random.rand(3).tolist() == expected
    finally:
        np.random.set_bit_generator(before)


def test_the_state_of_another_python_is_refused() -> None:
    tree = capture()
    tree["python"]["version"] = 4
    with pytest.raises(RestoreError, match="Python that wrote it"):
        restore(tree)


def test_missing_devices_are_warned_about() -> None:
    tree = capture()
    states = [torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())]
    tree["torch"]["cuda"] = [*states, torch.zeros(16, dtype=torch.uint8)]
    with pytest.warns(UserWarning, match="start it on as many devices"):
        restore(tree)


def test_each_rank_draws_numbers_of_its_own_which_follow_from_seed_rank_and_step() -> None:
    def drawn_by(seed: int, rank: int, step: int = 0) -> tuple[Any, ...]:
        with isolated():
            seed_all(3)
            rekey(seed, rank, step)
            return random.random(), np.random.rand(), torch.rand(1).item()

    places = [(seed, rank, step) for seed in (0, 7, 2**63) for rank in (1, 2, 255) for step in (0, 9)]
    drawn = [drawn_by(*place) for place in places]
    for numbers in zip(*drawn, strict=True):  # in each of the generators
        assert len(set(numbers)) == len(places)
    assert drawn == [drawn_by(*place) for place in places]
    with isolated():
        seed_all(3)
        expected = random.random(), np.random.rand(), torch.rand(1).item()
    assert drawn_by(7, 0) == drawn_by(8, 0, 4) == expected, "rank 0 goes on with its generators"


METRICS: dict[str, Callable[[], Any]] = {
    "sums": lambda: MulticlassAccuracy(3),
    "a growing list": lambda: BinaryAUROC(),
    "a window": lambda: Running(MeanMetric(), window=3),
    "extremes beside the states": lambda: MinMaxMetric(MulticlassAccuracy(3)),
    "groups that share their states": lambda: MetricCollection(
        [MulticlassAccuracy(3), MulticlassPrecision(3), MulticlassRecall(3)]
    ),
}


@pytest.mark.parametrize("kind", METRICS)
def test_one_that_is_collected_as_it_is_names_compute(kind: str) -> None:
    with pytest.raises(
        MetricError, match=r"(?s)metric 'accuracy' is .*; give what its \.compute\(\) returns"
    ):
        to_scalar("accuracy", METRICS[kind]())


class Model(nn.Module):
    """Torchmetrics inside a module, a temperature that falls and a hidden state."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)
        self.metric = METRICS[kind]()
        self.temperature = 1.0
        self.hidden = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> str:
        out = self.layer(x) / self.temperature + self.hidden
        self.temperature *= 0.9
        self.hidden = out.mean(0).detach()
        probabilities = out.detach().softmax(1)
        if isinstance(self.metric, BinaryAUROC):
            self.metric.update(probabilities[:, 0], (torch.arange(len(probabilities)) % 2))
        elif isinstance(self.metric, Running):
            self.metric.update(probabilities.max())
        else:
            self.metric.update(probabilities, torch.arange(len(probabilities)) % 3)
        return str((self.metric.compute(), out, self.temperature))


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("stop_at", [0, 1, 4])
def test_metrics_and_attributes_in_the_state_come_back(kind: str, stop_at: int) -> None:
    def entered() -> tuple[Model, Any]:
        model = Model(kind)
        entry = make_entry("models", {"all": [model]})
        entry.enter()
        return model, entry

    batches = [torch.arange(12.0).view(4, 3) / (n + 3) for n in range(7)]
    (model, entry), (fresh, other) = entered(), entered()
    for batch in batches[:stop_at]:
        model(batch)
    tree = decode(encode(entry.save()))
    expected = [model(batch) for batch in batches[stop_at:]]
    assert not any(other.check(tree))
    for loaded, into in ((fresh, other), (model, entry)):  # a new process, and a rollback in the same one
        into.load(tree)
        assert [loaded(batch) for batch in batches[stop_at:]] == expected


class Counting(nn.Module):
    def __init__(self, limit: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen, self.limit, self.log = 0, limit, ["made"]

    def step(self) -> None:
        self.seen += 1
        self.log.append(f"step {self.seen}")


def count(model: Any, run_dir: Path, steps: int, **arguments: Any) -> Any:
    sv = everstep.Supervisor(run_dir, {"model": model}, default_services=False, max_step=steps, **arguments)
    supervised(sv, lambda sv: model.step())
    return model


def summed(value: Any, n: int) -> Any:
    return value + type(value)(n) if isinstance(value, np.generic) else value + np.float32(n)


def counted(value: Any, n: int) -> Any:
    value[n % 3] += n
    return value


ATTRIBUTES: dict[str, tuple[Callable[[], Any], Callable[[Any, int], Any]]] = {
    "a number of NumPy": (lambda: np.float32(0.1), summed),
    "an integer of NumPy": (lambda: np.int64(1), summed),
    "a number that becomes one of NumPy": (lambda: 0.1, summed),
    "a truth of NumPy": (lambda: np.bool_(True), lambda value, n: np.bool_(n % 2)),
    "a list of them": (lambda: [np.float64(0.1)], lambda value, n: [*value, np.float64(n)]),
    "a Counter": (Counter, counted),
    "a defaultdict": (lambda: defaultdict(float), counted),
    "a large Counter": (lambda: Counter(range(20_000)), counted),
    "a full queue": (lambda: deque(range(20_000), 20_000), lambda value, n: value.append(n) or value),
}


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_an_attribute_that_becomes_a_number_of_numpy_or_counts_comes_back(kind: str) -> None:
    """`self.scale = 0.9 * self.scale + 0.1 * np.mean(x)` was lost, and nobody was told."""

    def entered() -> tuple[nn.Linear, Any]:
        owner = type("Owner", (nn.Linear,), {})(1, 1)
        owner.kept = ATTRIBUTES[kind][0]()
        entry = make_entry("model", owner)
        entry.enter()
        return owner, entry

    def grow(owner: Any, numbers: Iterable[int]) -> list[str]:
        kept = []
        for n in numbers:
            owner.kept = ATTRIBUTES[kind][1](owner.kept, n)
            kept.append(f"{type(owner.kept)} {owner.kept!r}")
        return kept

    (model, entry), (fresh, other) = entered(), entered()
    grow(model, range(1, 5))
    tree, held = decode(encode(entry.save())), fresh.kept
    expected = grow(model, range(5, 12))
    for loaded, into in ((fresh, other), (model, entry)):  # a new process, and a rollback in the same one
        into.load(tree)
        assert grow(loaded, range(5, 12)) == expected
    assert fresh.kept is held or not isinstance(held, dict), "other names may hold it"


def test_a_dict_with_a_factory_of_the_program_is_not_saved_and_ends_no_save() -> None:
    model = type("Owner", (nn.Linear,), {})(1, 1)
    model.kept = defaultdict(lambda: 0.0)
    entry = make_entry("model", model)
    entry.enter()
    model.kept["a"] += 1
    encode(entry.save())


def test_a_setting_that_training_leaves_alone_is_as_the_program_gives_it(tmp_path: Path) -> None:
    count(Counting(limit=3), tmp_path / "run", 2)
    model = count(Counting(limit=9), tmp_path / "run", 4)
    assert (model.seen, model.limit, model.log) == (4, 9, ["made", *(f"step {n}" for n in range(1, 5))])


def test_a_scalar_of_a_layer_of_torch_that_training_changes_comes_back(tmp_path: Path) -> None:
    def trained(rate: float, momentum: float, steps: int) -> nn.Sequential:
        layers = nn.Dropout(rate), nn.BatchNorm1d(1, momentum=momentum), nn.CrossEntropyLoss()
        model = nn.Sequential(*layers, nn.Conv1d(1, 1, 1))

        def step(sv: Any) -> None:
            if sv.step == 0:
                model[0].p, model[2].reduction = 0.25, "sum"  # type: ignore[assignment]
                model[3].dilation = (2,)  # type: ignore[assignment]

        state = {"model": model}
        supervised(everstep.Supervisor(tmp_path / "run", state, default_services=False, max_step=steps), step)
        return model

    assert trained(0.5, 0.1, 2)[0].p == 0.25
    model = trained(0.5, 0.2, 4)
    assert (model[0].p, model[2].reduction, model[3].dilation) == (0.25, "sum", (2,))
    assert model[1].momentum == 0.2, "the momentum is the program's: no step changed it"


class Table(nn.Module):
    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table

    def step(self) -> None:
        self.table += 1


class Replaced(Table):
    def step(self) -> None:
        self.table = self.table + 1


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_a_large_attribute_that_cannot_go_back_in_one_process_is_named(make: Any) -> None:
    def gone_back(model: Table) -> float:
        entry = make_entry("model", model)
        entry.enter()
        tree = decode(encode(entry.save()))
        model.step()
        entry.load(tree)
        return float(model.table[0])

    assert gone_back(Table(make(1 << 10))) == gone_back(Replaced(make(1 << 10))) == 0
    with pytest.raises(RestoreError, match=r"Table.table was changed by a loop .* make a new model"):
        gone_back(Table(make(1 << 19)))


class Counts(nn.Module):
    """Counts in place, more than is copied or looked through one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.array, self.list, self.tail = np.zeros(1 << 18), [0.0] * 20_000, {i: 0 for i in range(20_000)}

    def forward(self) -> None:
        self.array[7] += 1
        self.list[7] += 1
        self.tail[7] += 1


def test_what_is_large_and_changed_in_place_comes_back() -> None:
    tree: Any = None
    for _ in range(3):
        counts = Counts()
        entry = make_entry("counts", counts)
        entry.enter()
        if tree is not None:
            entry.load(tree)
        counts()
        tree = decode(encode(entry.save()))
    assert (counts.array[7], counts.list[7], counts.tail[7]) == (3, 3, 3)


def test_attributes_are_no_weights_to_export(tmp_path: Path) -> None:
    class Holding(Counting):
        def step(self) -> None:
            self.hidden = torch.ones(2)

    export = everstep.services.Export(everstep.Every(steps=2))
    count(Holding(), tmp_path / "run", 2, services=[export])
    from safetensors import safe_open

    (path,) = (tmp_path / "run" / "exports").rglob("*.safetensors")
    with safe_open(path, "np") as file:
        assert set(file.keys()) == {"layer.weight", "layer.bias"}


@pytest.mark.parametrize("at", [0, 1])
def test_parameters_that_are_tied_in_the_loop_are_named(tmp_path: Path, at: int) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))

    def tie(step: int) -> None:
        if step == at:
            model[1].weight = model[0].weight

    tie(0)
    state, checkpoints = {"model": model}, everstep.Checkpoints(everstep.Every(steps=1))
    sv = everstep.Supervisor(tmp_path, state, default_services=False, services=[checkpoints], max_step=3)
    said = supervised(sv, lambda sv: tie(sv.step)).ending.warnings
    assert ["'model/0.weight' and 'model/1.weight'" in each for each in said] == [True] * at


def test_a_part_of_another_class_is_named_in_the_loop_and_at_the_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(last: int) -> str:
        model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())

        def change(sv: Any) -> None:
            if sv.step == 1:
                model[1] = nn.GELU()

        supervised(
            everstep.Supervisor(tmp_path, {"model": model}, default_services=False, max_step=last), change
        )
        return "".join(capsys.readouterr())

    assert "model.modules(): the loop changes it and the state does not save it" in start(3)
    assert "model.modules() (another value)" in start(4)


GROWING: dict[str, Callable[[nn.ModuleList], object]] = {
    "layers": lambda parts: parts.append(nn.Linear(1, 1)),
    "metrics": lambda parts: parts.append(MeanMetric()),
    "a layer fewer": lambda parts: parts.pop(0) if len(parts) else None,
    "a wider layer": lambda parts: parts.__setitem__(0, nn.Linear(1, len(parts) + 3)),
}


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("kind", GROWING)
def test_a_module_that_gets_other_parts_is_said_once_before_a_resume_refuses_it(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(stop_at: int = 0) -> None:
        parts = nn.ModuleList([nn.Linear(1, 1)])
        state = {"parts": {"inner": parts} if kind == "layers" else parts, "other": nn.Linear(1, 1)}
        with everstep.TrainLoop(tmp_path / "run", state, max_epoch=4, default_services=False) as loop:
            for _ in loop.iter_epochs():
                for step, _ in loop.iter_steps([1.0, 2.0]):
                    if step == stop_at:
                        raise InterruptedError
                    if isinstance(value := parts[-1] if len(parts) else None, MeanMetric):
                        value.update(1.0)
                if loop.epoch < 3:
                    GROWING[kind](parts)

    with pytest.raises(InterruptedError):
        train(stop_at=5)
    said = "".join(capsys.readouterr())
    assert said.count("its parts are not those that it had at the start") == said.count("entry 'parts'") == 1
    with pytest.raises(RestoreError):
        train()
