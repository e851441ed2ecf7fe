"""Data that is taken at its word is tried, on copies, before its state counts."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everstep
from everstep.errors import NotResumableError
from everstep.record import RunJournal
from everstep.state import capture, digest, encode
from everstep.supervisor.streams import run_stream


class Data:
    """Twelve batches in an order of its own; tells all that the next ones depend on."""

    def __init__(self) -> None:
        self.at = 0
        self.payload = np.arange(12)

    def __iter__(self) -> Iterator[Any]:
        for at in range(self.at, 12):
            self.at = at + 1
            yield self.batch(at)
        self.at = 0

    def batch(self, at: int) -> Any:
        return self.payload[at : at + 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Forgets(Data):
    """Its sums are no part of its state; each pass begins them anew."""

    def __iter__(self) -> Iterator[Any]:
        total = 0
        for value in super().__iter__():
            total += int(value[0])
            yield value + total


EACH_ANOTHER = count()


class Draws(Forgets):
    """Its batches follow from nothing: the same pass is never given twice."""

    def batch(self, at: int) -> Any:
        return np.full(2, next(EACH_ANOTHER))


class Open(Data):
    def __init__(self) -> None:
        super().__init__()
        self.file = open(__file__)  # noqa: SIM115


class Noting(Data):
    """What was drawn from it, copies included."""

    drawn: list[int] = []  # noqa: RUF012

    def batch(self, at: int) -> Any:
        random.random()
        Noting.drawn.append(at)
        return super().batch(at)


def program(run_dir: Path, data: Any, *, stop_at: int = 0, passes: int = 2) -> list[tuple[int, Any]]:
    saves = everstep.Checkpoints(everstep.Every(steps=1))
    seen = []
    loop = everstep.TrainLoop(run_dir, services=[saves], max_epoch=passes, seed=1)
    with loop:
        for _ in loop.iter_epochs():
            for step, batch in loop.iter_steps(data):
                if step == stop_at:
                    raise InterruptedError
                seen.append((step, np.asarray(batch).tolist()))
    return seen


def tried(run_dir: Path) -> list[dict[str, Any]]:
    return [event.data for event in RunJournal(run_dir).events() if event.kind == "tried"]


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(("kind", "kept"), [(Data, True), (Forgets, False)])
@pytest.mark.parametrize("stop_at", [5, 17])
def test_a_resume_is_exact_whether_its_state_brings_it_back_or_not(
    tmp_path: Path, kind: type, kept: bool, stop_at: int
) -> None:
    whole = program(tmp_path / "whole", kind())
    with pytest.raises(InterruptedError):
        program(tmp_path / "cut", kind(), stop_at=stop_at)
    assert program(tmp_path / "cut", kind()) == whole[stop_at - 1 :]
    assert [(each["kept"], each["replays"]) for each in tried(tmp_path / "cut")] == [(kept, not kept)] * 2


def test_data_that_cannot_be_brought_back_at_all_is_refused_at_the_first_save(tmp_path: Path) -> None:
    with pytest.raises(
        NotResumableError, match=r"stream 'train': its state does not bring it back: .*replay"
    ):
        program(tmp_path / "run", Draws())


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (Data(), r"its first batch took \d\.\d s"),
        (Open(), "it cannot be copied .*TextIOWrapper"),
        (iter([1, 2, 3]), None),
        ([1, 2, 3], None),
    ],
)
def test_what_is_not_tried_is_recorded_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Any, why: str | None
) -> None:
    if isinstance(data, Data) and not isinstance(data, Open):
        monkeypatch.setattr(run_stream, "SLOWEST", 0.0)
    with everstep.TrainLoop(tmp_path / "run", max_epoch=1, default_services=False) as loop:
        for _ in loop.iter_epochs():
            for _ in loop.iter_steps(data):
                pass
    if why is None:
        assert tried(tmp_path / "run") == []
    else:
        (found,) = tried(tmp_path / "run")
        assert found["kept"] is None
        assert re.search(why, found["why"])


def test_a_trial_leaves_the_data_the_random_state_and_the_batches_as_they_were(tmp_path: Path) -> None:
    Noting.drawn.clear()
    states = []

    def after_a_step() -> None:
        states.append(digest(encode(capture())))

    data = Noting()
    random.seed(3)
    with everstep.TrainLoop(tmp_path / "run", max_epoch=1, max_step=3, default_services=False) as loop:
        for _ in loop.iter_epochs():
            for step, batch in loop.iter_steps(data):
                assert data.at == step and batch[0] == step - 1
                after_a_step()
    assert len(Noting.drawn) > 3  # it was tried
    random.seed(3)
    for state in states:
        random.random()
        assert digest(encode(capture())) == state
