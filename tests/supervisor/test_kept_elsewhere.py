"""What services, and objects in modules and tasks, keep and nobody saves is named at saves and resumes."""

from __future__ import annotations

import math
import time
from argparse import Namespace
from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep import Boundary, Evaluate, Every, Outcome, Service
from everstep.errors import Interrupted
from everstep.services import Console, Interrupt, JSONLines, Moment, SetValue, Stage, When

BATCHES = [1.0, 2.0, 3.0, 4.0]


class Decay(Service):
    """Changes the learning rate by a count of its own."""

    stage, controller = Stage.DECIDE, True

    def __init__(self, settings: dict[str, float]) -> None:
        super().__init__("decay", Every(steps=2))
        self.settings, self.count, self.names = settings, 0, ["a"]

    def run(self, boundary: Boundary) -> Outcome | None:
        self.count += 1
        self.settings["rate"] = 1 / (1 + self.count)
        return None


class SavedDecay(Decay):
    def state_dict(self) -> Any:
        return self.count

    def load_state_dict(self, state: Any) -> None:
        self.count = state


class Calls:
    """An object that a service calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *arguments: Any) -> Any:
        self.count += 1

    def measure(self, service: Any) -> dict[str, float]:
        self.count += 1
        return {"measured": 1.0}

    def note(self, boundary: Boundary) -> None:
        self.count += 1

    def at_third(self, values: Any) -> bool:
        self.count += 1
        return self.count == 3


def on(moment: Moment, function: Callable[[Boundary], Any]) -> Callable[[Any], object]:
    return lambda loop: loop.on(moment, function)


def lines_of(
    run_dir: Path,
    services: list[Service],
    stop_at: int | None,
    state: dict[str, Any] | None = None,
    begin: Callable[[Any], object] = lambda loop: None,
) -> list[str]:
    """What a start says that pauses at a step."""
    _lines: list[str] = []
    listed = [Console(sink=_lines.append), *services]
    try:
        with everstep.TrainLoop(run_dir, state or {}, seed=1, max_epoch=3, services=listed) as loop:
            begin(loop)
            for _ in loop.iter_epochs():
                for step, batch in loop.iter_steps(BATCHES):
                    loop.collect_metrics(loss=batch)
                    if step == stop_at:
                        loop.call_soon(Interrupt("a pause"))
    except Interrupted:
        pass
    return [line for line in _lines if line.startswith("warning: ")]


def kept(kind: str) -> tuple[list[Service], dict[str, Any], Callable[[Any], object]]:
    settings, calls = {"rate": 1.0}, Calls()
    state: dict[str, Any] = {"settings": settings}
    match kind:
        case "decay.count":
            return [Decay(settings)], state, lambda loop: None
        case "Calls.count":
            return [], state, on(Moment.AFTER_STEP, calls)
        case "Calls.count at epochs":
            return [], state, on(Moment.AFTER_EPOCH, calls.note)
        case "measured: Calls.count":
            return [Evaluate(every=Every(steps=2), evaluator=calls.measure, name="measured")], state, id
        case "when: Calls.count":
            change = SetValue("settings.rate", times=0.5)
            return [When(calls.at_third, change, every=Every(steps=1), name="when")], state, id
    raise AssertionError(kind)


KINDS = (
    *("decay.count", "Calls.count", "Calls.count at epochs"),
    *("measured: Calls.count", "when: Calls.count"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_count_that_a_service_does_not_save_is_named_at_a_save_and_at_a_resume(
    kind: str, tmp_path: Path
) -> None:
    services, state, begin = kept(kind)
    (at_save,) = lines_of(tmp_path, services, 6, state, begin)
    assert at_save.startswith(
        f"warning: {kind.removesuffix(' at epochs')}: a service of yours, or an object that it calls, changes"
    )
    services, state, begin = kept(kind)
    at_resume = lines_of(tmp_path, services, None, state, begin)[0]
    assert (
        at_resume.startswith(f"warning: {kind.removesuffix(' at epochs')} (0, was ")
        and "data or service" in at_resume
    )


def test_two_objects_of_one_class_are_both_named(tmp_path: Path) -> None:
    def both(loop: Any) -> None:
        for calls in (Calls(), Calls()):
            loop.on(Moment.AFTER_STEP, calls)

    (at_save,) = lines_of(tmp_path, [], 6, begin=both)
    assert at_save.startswith("warning: Calls.count, Calls.count #2: a service of yours")


def test_what_a_service_or_the_state_saves_is_not_named(tmp_path: Path) -> None:
    for stop_at in (6, None):
        settings, calls = {"rate": 1.0}, Calls()
        services: list[Service] = [SavedDecay(settings), JSONLines("logs/lines.jsonl")]
        state = {"settings": settings, "calls": vars(calls)}
        assert lines_of(tmp_path, services, stop_at, state, on(Moment.AFTER_STEP, calls)) == []


class Annealed:
    def __init__(self) -> None:
        self.count, self.phase, self.line = 0, "warm", ""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.annealed, self.own_count = nn.Linear(1, 1), Annealed(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (1 + 0.01 * self.annealed.count)  # type: ignore[no-any-return]


def test_an_object_in_a_module_that_only_tails_change_is_named(tmp_path: Path) -> None:
    _lines: list[str] = []

    def train(stop_at: int | None) -> None:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        state, console = {"net": net, "optimizer": optimizer}, Console(sink=_lines.append)
        with everstep.TrainLoop(tmp_path, state, seed=1, max_epoch=3, services=[console]) as loop:
            for _ in loop.iter_epochs():
                for step, batch in loop.iter_steps(BATCHES):
                    net(torch.tensor([batch])).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if step == stop_at:
                        loop.call_soon(Interrupt("a pause"))
                net.annealed.count += 1
                net.annealed.phase, net.annealed.line = "main", f"epoch {loop.epoch}"
                net.own_count += 1

    with pytest.raises(Interrupted):
        train(10)
    train(None)
    at_save, at_resume, differs = (line for line in _lines if line.startswith("warning: "))
    assert differs.startswith("warning: resume differs: step 11 state 'parameters' was ")
    assert at_save.startswith(
        "warning: net.annealed.count, net.annealed.phase: the loop changes it and the state does not save it"
    )
    assert at_resume.startswith(
        "warning: net.annealed.count (0, was 2), net.annealed.phase (another value): "
    )


class Task(everstep.torch.Task):
    def build_model(self) -> nn.Module:
        self.annealed, self.loss = Annealed(), nn.CrossEntropyLoss(weight=torch.ones(2))
        return nn.Linear(1, 1)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def forward(self, batch: Any) -> Any:
        return {"loss": self.model(batch[0]).square().mean() * (1 + self.annealed.count)}

    def train_loop_end(self) -> None:
        self.annealed.count += 1
        self.loss.weight[0] += 1  # type: ignore[index]
        self.loss.reduction = "sum"


def test_an_object_in_a_task_that_its_tail_changes_is_named(tmp_path: Path) -> None:
    _lines: list[str] = []
    data = {"train": everstep.data.arrays(torch.ones(8, 1), batch_size=2)}
    for max_epoch in (2, 3):
        console = Console(sink=_lines.append)
        everstep.Trainer(
            Task(), data, tmp_path, max_epoch=max_epoch, seed=1, services=[console]
        ).run_training()
    at_save, at_resume = (line for line in _lines if line.startswith("warning: annealed.count"))
    assert (
        "annealed.count, loss.reduction, loss.weight: the loop changes it and the state does not" in at_save
    )
    assert "(0, was 2), loss.reduction (another value), loss.weight (another value)" in at_resume


VALUES: dict[str, Callable[[], Any]] = {
    "argparse": lambda: Namespace(n=1),
    "namespace": lambda: SimpleNamespace(n=1),
    "counter": lambda: Counter(a=1),
    "defaultdict": lambda: defaultdict(int, a=1),
    "bytes": lambda: bytearray(b"\1"),
    "array": lambda: array("d", [1.0]),
}
OTHERS: dict[str, tuple[Any, Any]] = {
    "complex": (1j, 2j),
    "decimal": (Decimal("1.5"), Decimal("2.5")),
    "fraction": (Fraction(1, 3), Fraction(1, 2)),
    "tuple": ((1, 2), (1, 3)),
    "class": (Every, Path),
    "enum": (Moment.AFTER_STEP, Moment.AFTER_EPOCH),
    "function": (math.ceil, math.floor),
    "partial": (partial(max, 1), partial(min, 1)),
    "method": ("".join, "".strip),
    "range": (range(1), range(2)),
    "slice": (slice(1), slice(2)),
    "bytes": (b"1", b"2"),
    "path": (Path("a"), Path("b")),
    "objects": ([object()], [object(), object()]),
    "configuration": (type("Config", (dict,), {})(a=1), type("Config", (dict,), {})(a=2)),
}
"""Values that a loop may give a variable in place of one another."""


def changed(value: Any) -> None:
    if hasattr(value, "n"):
        value.n += 1
    else:
        value["a" if isinstance(value, dict) else 0] += 1


@pytest.mark.parametrize("kind", VALUES)
def test_variables_of_many_kinds_are_compared(kind: str, tmp_path: Path) -> None:
    def train(stop_at: int | None) -> list[str]:
        value, counted = VALUES[kind](), count()
        _lines: list[str] = []
        services = [Console(sink=_lines.append)]
        with everstep.TrainLoop(tmp_path, {}, seed=1, max_epoch=3, services=services) as loop:
            for _ in loop.iter_epochs():
                for step, _ in loop.iter_steps(BATCHES):
                    changed(value)
                    next(counted)
                    if step == stop_at:
                        loop.call_soon(Interrupt("a pause"))
        return _lines

    with pytest.raises(Interrupted):
        train(6)
    (lost,) = [line for line in train(None) if "is not as it was" in line]
    name = "value.n (1, was 7)" if kind in ("argparse", "namespace") else "value (another value)"
    assert name in lost and "counted (count(0), was count(6))" in lost


@pytest.mark.parametrize("kind", OTHERS)
def test_another_value_in_a_variable_is_named_of_whatever_kind(kind: str, tmp_path: Path) -> None:
    def train(stop_at: int | None) -> list[str]:
        value, other = OTHERS[kind]
        _lines: list[str] = []
        services = [Console(sink=_lines.append)]
        with everstep.TrainLoop(tmp_path, {}, seed=1, max_epoch=3, services=services) as loop:
            for _ in loop.iter_epochs():
                for step, _ in loop.iter_steps(BATCHES):
                    value = other if step == 5 else value
                    if step == stop_at:
                        loop.call_soon(Interrupt("a pause"))
        return _lines

    with pytest.raises(Interrupted):
        train(6)
    (lost,) = [line for line in train(None) if "is not as it was" in line]
    assert lost.startswith("warning: value (")


def test_a_state_with_an_ordered_dictionary_is_as_it_was(tmp_path: Path) -> None:
    def train(stop_at: int | None) -> list[str]:
        order = OrderedDict((number, 1.0) for number in range(4))
        state, _lines = {"order": order}, list[str]()
        services = [Console(sink=_lines.append)]
        with everstep.TrainLoop(tmp_path, state, seed=1, max_epoch=3, services=services) as loop:
            for _ in loop.iter_epochs():
                for step, _ in loop.iter_steps(BATCHES):
                    order.move_to_end(next(iter(order)))
                    if step == stop_at:
                        loop.call_soon(Interrupt("a pause"))
        return _lines

    with pytest.raises(Interrupted):
        train(6)
    assert not [line for line in train(None) if line.startswith("warning: ")]


class Shown(Service):
    """Prints; a resume may begin anew what it keeps."""

    def __init__(self) -> None:
        super().__init__("shown", Every(steps=1))
        self._count, self.line, self.last, self.recent, self.first = 0, "", 0.0, [0], None

    def run(self, boundary: Boundary) -> None:
        self._count += 1
        self.line, self.last, self.first = f"step {self._count}", time.monotonic(), self.first or 1
        self.recent.append(self._count)


class Control:
    """An entry of the state that saves what it holds."""

    def __init__(self) -> None:
        self.early = Calls()

    def state_dict(self) -> Any:
        return self.early.count

    def load_state_dict(self, state: Any) -> None:
        self.early.count = state


def test_what_may_begin_anew_or_is_saved_by_its_owner_is_not_named(tmp_path: Path) -> None:
    for stop_at in (6, None):
        control = Control()
        state = {"control": control}
        assert lines_of(tmp_path, [Shown()], stop_at, state, on(Moment.AFTER_STEP, control.early)) == []


class Warm:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> Any:
        return self.count

    def load_state_dict(self, state: Any) -> None:
        self.count = state


class SavingTask(Task):
    def build_model(self) -> nn.Module:
        self.warm = Warm()
        return nn.Linear(1, 1)

    def forward(self, batch: Any) -> Any:
        return {"loss": self.model(batch[0]).square().mean() * (1 + self.warm.count)}

    def state(self) -> dict[str, Any]:
        return {**super().state(), "warm": self.warm}

    def train_loop_end(self) -> None:
        self.warm.count += 1


def test_an_object_that_a_task_returns_from_its_state_is_not_named_before_its_third_step(
    tmp_path: Path,
) -> None:
    data = {"train": everstep.data.arrays(torch.ones(2, 1), batch_size=2)}
    for max_epoch in (2, 3):
        _lines: list[str] = []
        services = [Console(sink=_lines.append)]
        task = SavingTask()
        everstep.Trainer(task, data, tmp_path, max_epoch=max_epoch, seed=1, services=services).run_training()
        assert task.warm.count == max_epoch and not [line for line in _lines if "warm" in line]
