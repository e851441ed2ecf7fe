"""`check`: the trial of any object, as a function and as a command."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from everstep.cli.check import command
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
    assert "a list, as data\nits own word: it has no state_dict\nin a run of everstep: kept: " in said
    said = run(f"{file}:Mean", "--change", f"{file}:update", "--json", status=1)
    assert json.loads(said)["word"]["kept"] is False
    wrong = CliRunner().invoke(command, [f"{file}:batch"])
    assert isinstance(wrong.exception, ConfigError) and "did you mean 'batches'" in str(wrong.exception)
