"""Torchmetrics' objects in `state`, whatever they call persistent, and modules with plain attributes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassPrecision,
    MulticlassRecall,
)
from torchmetrics.wrappers import MinMaxMetric, Running

import everstep
from everstep.errors import MetricError, RestoreError
from everstep.metrics.collector import to_scalar
from everstep.state import decode, encode, make_entry

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
    quiet = {"default_services": False, "max_step": steps, **arguments}
    with everstep.Supervisor(run_dir, {"model": model}, **quiet) as sv:
        sv.stream(None)
        while not sv.should_stop():
            model.step()
            sv.advance()
    return model


def test_a_setting_that_training_leaves_alone_is_as_the_program_gives_it(tmp_path: Path) -> None:
    count(Counting(limit=3), tmp_path / "run", 2)
    model = count(Counting(limit=9), tmp_path / "run", 4)
    assert (model.seen, model.limit, model.log) == (4, 9, ["made", *(f"step {n}" for n in range(1, 5))])


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
