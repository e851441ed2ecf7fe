"""What a run believes of data: a number, a known or declared state, and else only batches drawn again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everstep
from everstep.data import as_stream, replay, stateful
from everstep.errors import NotResumableError, RestoreError


class Lines:
    """Twelve batches; has no state."""

    def __iter__(self) -> Iterator[Any]:
        yield from (np.full(2, at) for at in range(12))


class Shuffled(Lines):
    """Draws the order of each pass from the global generator, as many datasets do."""

    def __iter__(self) -> Iterator[Any]:
        order = list(range(12))
        random.shuffle(order)
        yield from (np.full(2, at) for at in order)


class Epochs(Lines):
    """Its order follows from the epoch that it is told."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        yield from np.random.default_rng(self.epoch).permutation(24).reshape(12, 2)


class Place(Lines):
    """Tells its place, and the generator that makes each pass another one."""

    def __init__(self) -> None:
        self.at, self.generator = 0, np.random.default_rng(5)

    def __iter__(self) -> Iterator[Any]:
        order = self.generator.permutation(12)
        for at in range(self.at, 12):
            self.at = at + 1
            yield np.full(2, order[at])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "generator": self.generator.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.generator.bit_generator.state = state["at"], state["generator"]


class Counts(Place):
    """Its state is the whole place."""

    def __iter__(self) -> Iterator[Any]:
        for at in range(self.at, 12):
            self.at = at + 1
            yield np.full(2, at)
        self.at = 0


class Hard(Lines):
    """Drawing a batch changes an entry of the run's state."""

    def __init__(self, drawn: dict[str, int]) -> None:
        self.drawn = drawn

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.drawn["batches"] += 1
            yield batch


EACH_ANOTHER = count()


class Chance(Lines):
    """The same pass is never given twice."""

    def __iter__(self) -> Iterator[Any]:
        yield from (np.full(2, next(EACH_ANOTHER)) for _ in range(12))


def program(
    run_dir: Path, data: Any, *, stop_at: int = 0, state: dict[str, Any] | None = None, **options: Any
) -> list[tuple[int, Any]]:
    saves = everstep.Checkpoints(everstep.Every(steps=1))
    seen = []
    loop = everstep.TrainLoop(run_dir, state, services=[saves], max_epoch=2, seed=1, **options)
    with loop:
        for _ in loop.iter_epochs():
            for step, batch in loop.iter_steps(data):
                if step == stop_at:
                    raise InterruptedError
                random.random()  # as a step draws
                seen.append((step, np.asarray(batch).tolist()))
    return seen


@pytest.mark.parametrize("stop_at", [5, 17])
@pytest.mark.parametrize(
    "make",
    [
        Lines,
        Shuffled,
        Epochs,
        Place,
        lambda: stateful(Counts()),
        lambda: everstep.data.checked(Epochs()),
    ],
    ids=["lines", "shuffled", "epochs", "place", "declared", "checked"],
)
def test_a_resume_inside_a_pass_is_exact(tmp_path: Path, make: Callable[[], Any], stop_at: int) -> None:
    whole = program(tmp_path / "whole", make())
    with pytest.raises(InterruptedError):
        program(tmp_path / "cut", make(), stop_at=stop_at)
    assert program(tmp_path / "cut", make()) == whole[stop_at - 1 :]


def test_a_state_that_nobody_vouched_for_is_used_where_a_pass_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InterruptedError):
        program(tmp_path / "run", Place(), stop_at=17)
    program(tmp_path / "run", Place())
    assert (
        "replayed 4 batches" in (said := capsys.readouterr().out) and "everstep.data.stateful(data)" in said
    )


def test_batches_that_come_otherwise_are_noticed_at_the_resume(tmp_path: Path) -> None:
    with pytest.raises(InterruptedError):
        program(tmp_path / "run", Chance(), stop_at=5)
    with pytest.raises(RestoreError, match=r"the 4 batches that were drawn again are not those.*set_epoch"):
        program(tmp_path / "run", Chance())


def test_nothing_is_drawn_but_what_the_run_is_handed(tmp_path: Path) -> None:
    drawn = {"batches": 0}
    assert len(program(tmp_path / "run", Hard(drawn), state={"drawn": drawn})) == drawn["batches"] == 24


def test_what_has_no_state_cannot_be_declared() -> None:
    with pytest.raises(NotResumableError, match="neither state_dict and load_state_dict nor"):
        stateful(iter([1]))
    cursor = stateful(Lines()).open("train", 0, seed=0)
    next(cursor)
    with pytest.raises(NotResumableError, match=r"without everstep\.data\.stateful"):
        cursor.position()


def test_what_is_known_to_tell_its_place_needs_no_word() -> None:
    class Grain(Place):
        pass

    assert [as_stream(data).resumes for data in (Place(), replay(Place()), stateful(Place()))] == [
        "replay",
        "replay",
        "state",
    ]
    Grain.__module__ = "grain._src.python.data_loader"
    assert as_stream(Grain()).resumes == "state"
