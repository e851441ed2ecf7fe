"""What services, and objects in modules and tasks, keep and nobody saves is named at saves and resumes."""

from __future__ import annotations

import math
import time
from argparse import Namespace
from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_program_variables import BATCHES, cut, lost_of, opened, pause
from torch import nn

import everstep
from everstep import Boundary, Evaluate, Every, Outcome, Service
from everstep.backends.torch.update_counter import TorchUnsavedObjects
from everstep.errors import Interrupted
from everstep.services import Console, JSONLines, Moment, SetValue, Stage, When


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


class SavesCount:
    count: int

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
    run_dir: Path, services: list[Service], stop_at: int | None, state: Any, begin: Any
) -> list[str]:
    """What a start warns of that pauses at a step; `begin` is called with its loop."""
    _lines: list[str] = []
    with suppress(Interrupted), opened(run_dir, state, _lines, services) as loop:
        begin(loop)
        for _ in loop.iter_epochs():
            for step, batch in loop.iter_steps(BATCHES):
                loop.collect_metrics(loss=batch)
                pause(loop, step == stop_at)
    return warned(_lines)


def warned(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("warning: ")]


KEPT: dict[str, Callable[[Any, Calls], tuple[list[Service], Any]]] = {
    "decay.count": lambda settings, calls: ([Decay(settings)], id),
    "Calls.count": lambda settings, calls: ([], on(Moment.AFTER_STEP, calls)),
    "Calls.count at epochs": lambda settings, calls: ([], on(Moment.AFTER_EPOCH, calls.note)),
    "measured: Calls.count": lambda settings, calls: (
        [Evaluate(every=Every(steps=2), evaluator=calls.measure, name="measured")], id
    ),
    "when: Calls.count": lambda settings, calls: (
        [When(calls.at_third, SetValue("settings.rate", times=0.5), every=Every(steps=1), name="when")], id
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KEPT)
def test_a_count_that_a_service_does_not_save_is_named_at_a_save_and_at_a_resume(kind, tmp_path) -> None:
    said = []
    for stop_at in (6, None):
        services, begin = KEPT[kind](settings := {"rate": 1.0}, Calls())
        said.append(lines_of(tmp_path, services, stop_at, {"settings": settings}, begin))
    (at_save,), (at_resume, *_), name = *said, f"warning: {kind.removesuffix(' at epochs')}"
    assert at_save.startswith(f"{name}: a service of yours, or an object that it calls, changes")
    assert at_resume.startswith(f"{name} (0, was ") and "data or service" in at_resume


def test_two_objects_of_one_class_are_both_named(tmp_path: Path) -> None:
    def both(loop: Any) -> None:
        for calls in (Calls(), Calls()):
            loop.on(Moment.AFTER_STEP, calls)

    (at_save,) = lines_of(tmp_path, [], 6, {}, both)
    assert at_save.startswith("warning: Calls.count, Calls.count #2: a service of yours")


def test_what_a_service_or_the_state_saves_is_not_named(tmp_path: Path) -> None:
    for stop_at in (6, None):
        settings, calls = {"rate": 1.0}, Calls()
        saved = type("SavedDecay", (SavesCount, Decay), {})(settings)
        services: list[Service] = [saved, JSONLines("logs/lines.jsonl")]
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
    def train(_lines: list[str], stop_at: int | None) -> None:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with opened(tmp_path, {"net": net, "optimizer": optimizer}, _lines) as loop:
            for _ in loop.iter_epochs():
                for step, batch in loop.iter_steps(BATCHES):
                    net(torch.tensor([batch])).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    pause(loop, step == stop_at)
                net.annealed.count += 1
                net.annealed.phase, net.annealed.line = "main", f"epoch {loop.epoch}"
                net.own_count += 1

    first, again = cut(train, 10)
    at_save, at_resume, differs = warned(first + again)
    assert differs.startswith("warning: resume differs: step 11 state 'parameters' was ")
    names = "net.annealed.count, net.annealed.phase"
    assert at_save.startswith(f"warning: {names}: the loop changes it and the state does not save it")
    names = "net.annealed.count (0, was 2), net.annealed.phase (another value)"
    assert at_resume.startswith(f"warning: {names}: ")


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


def started(task: everstep.Task, run_dir: Path, max_epoch: int, samples: int) -> list[str]:
    """What a Trainer says that goes on to the end of this epoch."""
    lines: list[str] = []
    data = {"train": everstep.data.arrays(torch.ones(samples, 1), batch_size=2)}
    options: Any = {"max_epoch": max_epoch, "seed": 1, "services": [Console(sink=lines.append)]}
    everstep.Trainer(task, data, run_dir, **options).run_training()
    return lines


def test_an_object_in_a_task_that_its_tail_changes_is_named(tmp_path: Path) -> None:
    lines = [line for epochs in (2, 3) for line in started(Task(), tmp_path, epochs, samples=8)]
    at_save, at_resume = (line for line in lines if line.startswith("warning: annealed.count"))
    names = "annealed.count, loss.reduction, loss.weight"
    assert f"{names}: the loop changes it and the state does not" in at_save
    assert "(0, was 2), loss.reduction (another value), loss.weight (another value)" in at_resume


IN_PLACE: dict[str, Callable[[], Any]] = {
    "argparse": lambda: Namespace(n=1), "namespace": lambda: SimpleNamespace(n=1),
    "counter": lambda: Counter(a=1), "defaultdict": lambda: defaultdict(int, a=1),
    "bytearray": lambda: bytearray(b"\1"), "array": lambda: array("d", [1.0]),
}  # fmt: skip
OTHERS: dict[str, tuple[Any, Any]] = {
    "complex": (1j, 2j), "decimal": (Decimal("1.5"), Decimal("2.5")),
    "fraction": (Fraction(1, 3), Fraction(1, 2)), "tuple": ((1, 2), (1, 3)), "class": (Every, Path),
    "enum": (Moment.AFTER_STEP, Moment.AFTER_EPOCH), "function": (math.ceil, math.floor),
    "partial": (partial(max, 1), partial(min, 1)), "method": ("".join, "".strip),
    "range": (range(1), range(2)), "slice": (slice(1), slice(2)), "bytes": (b"1", b"2"),
    "path": (Path("a"), Path("b")), "objects": ([object()], [object(), object()]),
    "configuration": (type("Config", (dict,), {})(a=1), type("Config", (dict,), {})(a=2)),
}  # fmt: skip
"""Values that a loop may give a variable in place of one another."""


def changed(value: Any) -> None:
    if hasattr(value, "n"):
        value.n += 1
    else:
        value["a" if isinstance(value, dict) else 0] += 1


@pytest.mark.parametrize("kind", [*IN_PLACE, *OTHERS])
def test_variables_of_many_kinds_are_compared(kind: str, tmp_path: Path) -> None:
    def train(_lines: list[str], stop_at: int | None) -> None:
        value, other = OTHERS[kind] if kind in OTHERS else (IN_PLACE[kind](), None)
        counted = count()
        with opened(tmp_path, {}, _lines) as loop:
            for _ in loop.iter_epochs():
                for step, _ in loop.iter_steps(BATCHES):
                    if kind in IN_PLACE:
                        changed(value)
                    value = other if step == 5 and kind in OTHERS else value
                    next(counted)
                    pause(loop, step == stop_at)

    lost = lost_of(cut(train, 6)[1])
    named = "value.n (1, was 7)" if "name" in kind or kind == "argparse" else "value (another value)"
    assert (named if kind in IN_PLACE else "value (") in lost and "counted (count(0), was count(6))" in lost


def test_a_state_with_an_ordered_dictionary_is_as_it_was(tmp_path: Path) -> None:
    def train(_lines: list[str], stop_at: int | None) -> None:
        order = OrderedDict((number, 1.0) for number in range(4))
        with opened(tmp_path, {"order": order}, _lines) as loop:
            for _ in loop.iter_epochs():
                for step, _ in loop.iter_steps(BATCHES):
                    order.move_to_end(next(iter(order)))
                    pause(loop, step == stop_at)

    assert warned(cut(train, 6)[1]) == []


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


class SavingTask(Task):
    def build_model(self) -> nn.Module:
        self.warm = type("Warm", (SavesCount, Calls), {})()
        return nn.Linear(1, 1)

    def forward(self, batch: Any) -> Any:
        return {"loss": self.model(batch[0]).square().mean() * (1 + self.warm.count)}

    def state(self) -> dict[str, Any]:
        return {**super().state(), "warm": self.warm}

    def train_loop_end(self) -> None:
        self.warm.count += 1


def test_an_object_that_a_task_returns_from_its_state_is_not_named_before_its_third_step(tmp_path) -> None:
    for max_epoch in (2, 3):
        lines = started(task := SavingTask(), tmp_path, max_epoch, samples=2)
        assert task.warm.count == max_epoch and not any("warm" in line for line in lines)


def test_a_save_looks_at_no_item_of_a_list_that_an_object_in_a_module_holds() -> None:
    """Of a tokenizer in a model each save read all 500,000 pairs: a second."""

    class Pairs(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("each item is looked at")

    tokenizer: Any = type("Tokenizer", (), {})()
    tokenizer.pairs, tokenizer.count = Pairs([1, 2]), 3
    model = type("Model", (nn.Linear,), {})(1, 1)
    model.tokenizer = tokenizer
    assert TorchUnsavedObjects({"model": model}, list).numbers()["model.tokenizer.count"] == 3
