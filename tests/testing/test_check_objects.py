"""`check`: what the house and its frameworks offer comes back, and each fault is found."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import everstep
from everstep.cli.proving import check_command as command
from everstep.errors import ConfigError
from everstep.testing import check


class Place:
    """Keeps its place, or says that it does."""

    def __init__(self, *, keeps: bool = True) -> None:
        self.at, self.keeps = 0, keeps

    def __iter__(self) -> Iterator[int]:
        for at in range(self.at, 9):
            self.at = at + 1
            yield at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at if self.keeps else 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Mean:
    """A mean whose count is part of its state, or is not."""

    def __init__(self, *, keeps: bool = True) -> None:
        self.mean, self.count, self.keeps = 0.0, 0, keeps

    def update(self) -> float:
        self.count += 1
        self.mean += (random.random() - self.mean) / self.count
        return self.mean

    def state_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "count": self.count if self.keeps else 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.count = state["mean"], state["count"]


@pytest.mark.parametrize("keeps", [True, False])
def test_data_and_state_keep_their_word_or_do_not(keeps: bool) -> None:
    data, mean = Place(keeps=keeps), Mean(keeps=keeps)
    for found in (check(data), check(mean, Mean.update)):
        assert found.word is not None and found.word.kept is keeps
        assert ("kept: " in str(found)) and ("not kept: " in str(found)) is (not keeps)
    assert check(data).run.kept  # a pass that begins anew can be drawn again
    assert (data.at, mean.count) == (0, 0)  # copies were tried


def test_what_everstep_saves_beyond_a_state_dict_counts_for_a_run() -> None:
    class Falling(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = 1.0

        def fall(self) -> float:
            self.temperature *= 0.9
            return self.temperature

    found = check(Falling(), lambda module: module.fall())
    assert found.word is not None and not found.word.kept and found.run.kept


def test_what_has_no_state_dict_is_none_and_refused_where_a_run_refuses_it() -> None:
    for obj, change, kept in (
        (np.random.default_rng(0), lambda g: g.random(), True),
        ([1, 2, 3], None, True),
        (object(), lambda each: None, False),
        (zip([1], [2], strict=True), None, False),
    ):
        found = check(obj, change)
        assert found.word is None and found.run.kept is kept


@pytest.mark.parametrize(
    "state",
    [
        {"a": float("nan"), "b": [1, 2]},
        {"w": np.zeros(3)},
        {},
        np.zeros(3),
        torch.nn.Sequential(torch.nn.Linear(2, 2)),
    ],
    ids=lambda state: type(state).__name__,
)
def test_what_gives_no_batches_is_state_though_it_can_be_iterated_over(state: Any) -> None:
    found = check(state)
    assert (found.kind, found.run.kept) == ("state", True)


def test_the_command_says_the_verdict_and_has_it_as_its_exit_status(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import random\n"
        "class Mean:\n"
        "    total = 0.0\n"
        "    def state_dict(self): return {}\n"
        "    def load_state_dict(self, state): pass\n"
        "def update(mean): mean.total += random.random(); return mean.total\n"
        "batches = [1, 2, 3]\n"
    )

    def run(*arguments: str, status: int) -> str:
        done = CliRunner().invoke(command, arguments)
        assert done.exit_code == status, done.output
        return done.output

    said = run(f"{file}:batches", status=0)
    assert "a list, as data\nits own state_dict: none\nin a run of everstep: kept: " in said
    said = run(f"{file}:Mean", "--change", f"{file}:update", "--json", status=1)
    assert json.loads(said)["word"]["kept"] is False
    wrong = CliRunner().invoke(command, [f"{file}:batch"])
    assert isinstance(wrong.exception, ConfigError) and "did you mean 'batches'" in str(wrong.exception)


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


def saves(effect: Callable[[Any], object]) -> Any:
    return lambda self: (effect(self), Counter.state_dict(self))[1]


def loads_leniently(self: Any, state: Any) -> None:
    self.count = state.get("count", 0)
    self.total[:] = state.get("total", 0)


def loads_rounded(self: Any, state: Any) -> None:
    self.count, self.total = state["count"], state["total"].astype(np.float32).astype(np.float64)


def fault(**methods: Any) -> type[Counter]:
    return type("Broken", (Counter,), methods)


FAULTS = [
    (fault(state_dict=lambda self: {}, load_state_dict=lambda self, state: None), "the change shows neither"),
    (
        fault(state_dict=lambda self: {"total": self.total}, load_state_dict=loads_leniently),
        "the restored object differs: total",
    ),
    (fault(load_state_dict=loads_rounded), "saves another one: total"),
    (fault(state_dict=saves(lambda self: setattr(self, "count", self.count + 1))), "twice in a row"),
    (fault(state_dict=saves(lambda self: np.random.rand())), "saving it draws"),
]


def test_each_fault_is_found_and_a_correct_object_passes() -> None:
    for kind, message in FAULTS:
        verdict = check(kind(), kind.work).run
        assert not verdict.kept and message in verdict.why
    assert check(Counter(), Counter.work).run.kept


def replace(slot: everstep.Slot) -> None:
    slot.value = (slot.value[0] + 1, np.random.rand())


def train(state: dict[str, Any]) -> None:
    state["optimizer"].zero_grad()
    state["model"](torch.rand(5, 3)).square().mean().backward()
    state["optimizer"].step()
    state["schedule"].step()


def step(optimizer: everstep.torch.ClipOptimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()


def training() -> dict[str, Any]:
    """A model, its optimizer and its schedule as one object."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


@pytest.mark.parametrize(
    ("obj", "change"),
    [
        (np.zeros((2, 3), np.float32), lambda a: a.__iadd__(np.random.rand(2, 3).astype(a.dtype))),
        (everstep.Slot((0, 0.0)), replace),
        ({"n": 0, "seen": np.zeros(2)}, lambda d: d.update(n=d["n"] + 1, last=np.random.rand())),
        (random.Random(3), lambda g: g.gauss(0, 1)),
        (np.random.default_rng(3), lambda g: g.integers(9, dtype=np.uint32)),
        (torch.Generator().manual_seed(3), lambda g: torch.randn(3, generator=g)),
        (training(), train),
        (everstep.PerRank({"n": 0}), lambda d: d.update(n=d["n"] + 1)),
        ((o := training()) and everstep.torch.ClipOptimizer(o["optimizer"]), step),
    ],
    ids=lambda each: type(each).__name__,
)
def test_what_a_run_saves_comes_back(obj: Any, change: Callable[[Any], object]) -> None:
    assert check(obj, change).run == (True, "a copy that was given its state does the same")


class CountsPasses:
    """Data whose order follows from its own count of passes, which nothing saves."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter([(place * self.passes) % 11 for place in range(1, 11)])


def test_the_pass_after_a_resume_is_opened_by_a_copy_that_has_read_nothing() -> None:
    verdict = check(CountsPasses()).run
    assert verdict.kept is False and "the pass after a resume" in verdict.why
