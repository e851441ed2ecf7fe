"""A state entry whose attributes change while its state does not is named at the first save."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import everstep
from everstep.cli.looking import show_command
from everstep.record import RunJournal


class Average:
    """An average of a model's weights."""

    def __init__(self, model: Any) -> None:
        self.model, self.shadow, self.updates = model, torch.zeros(1), 0
        self.generator = np.random.default_rng(0)

    def update(self) -> None:
        self.updates += 1
        self.shadow = self.shadow + self.generator.random()
        with torch.no_grad():
            self.model.weight += 1

    def state_dict(self) -> dict[str, Any]:
        state = self.generator.bit_generator.state
        return {"shadow": self.shadow, "updates": self.updates, "generator": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.updates = state["shadow"], state["updates"]
        self.generator.bit_generator.state = state["generator"]


class Forgets(Average):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


class Locked(Average):
    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.lock = threading.Lock()


class Inner:
    """An environment in an environment, as gymnasium's wrappers are; `generator` is not saved."""

    def __init__(self, inner: Inner | None = None) -> None:
        self.inner, self.elapsed = inner, [0, 0]
        self.generator = np.random.default_rng(0)


class Nested(Average):
    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.envs = [Inner(Inner())]
        self.seen: dict[str, Any] = {"last": {"reward": 0}, "first": 0}

    def update(self) -> None:
        super().update()
        inner = self.envs[0].inner
        assert inner is not None
        inner.elapsed[1] += 1
        inner.generator.random()
        self.seen["last"]["reward"] += 1


class Raises(Average):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AttributeError("there is no inner state")


def run(run_dir: Path, kind: Any) -> tuple[list[str], list[dict[str, Any]]]:
    model = torch.nn.Linear(1, 1)
    average = kind(model)
    state = {"model": model, "parts": {"average": average}}
    loop = everstep.Supervisor(run_dir, state, max_step=3, default_services=False)
    with loop as sv:
        sv.stream(None)
        while not sv.should_stop():
            average.update()
            sv.advance()
    tried = [event.data for event in RunJournal(run_dir).events() if event.kind == "tried"]
    assert average.updates == 3
    return list(loop.ending.warnings), tried


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(
    ("kind", "kept", "why"),
    [
        (Average, True, "a copy that was given its state had all"),
        (Forgets, False, "training changed updates, generator, and load_state_dict did not"),
        (
            Nested,
            False,
            "training changed envs[0].inner.elapsed[1], envs[0].inner.generator, seen['last']['reward'], and",
        ),
        (Raises, False, "cannot be loaded (AttributeError: there is no inner state)"),
        (Locked, None, "it cannot be copied (TypeError: cannot pickle '_thread.lock' object)"),
    ],
)
def test_what_its_state_does_not_bring_back_is_named_once(
    tmp_path: Path, kind: Any, kept: bool | None, why: str
) -> None:
    warnings, tried = run(tmp_path / "run", kind)
    assert [(each["state"], each["kept"]) for each in tried] == [("parts/average", kept)]
    assert why in tried[0]["why"]
    assert [why in text for text in warnings if "does not bring it back" in text] == [True] * (kept is False)


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        (Average, "comes back by its state: "),
        (Forgets, "its state does not bring it back: "),
        (Locked, "not tried: "),
    ],
)
def test_show_says_what_a_run_has_tried_and_what_not(tmp_path: Path, kind: Any, verdict: str) -> None:
    run(tmp_path / "run", kind)
    said = CliRunner().invoke(show_command, [str(tmp_path / "run")]).output
    (line,) = [line for line in said.splitlines() if "state parts/average" in line]
    assert verdict in line
