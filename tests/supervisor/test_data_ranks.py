"""The argument `data_ranks`: what it may be, and what all ranks have to say together."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import everstep
from everstep.contracts.group import DataRanks, Group
from everstep.errors import ConfigError, DisagreementError
from everstep.state import isolated, seed_all
from everstep.supervisor.data_ranks import Said, begin_random, divide, said
from everstep.supervisor.opening.configuration import fingerprint, layout


class Told(Group):
    """A group in which the other ranks have said something."""

    def __init__(self, *everyone: Said | None) -> None:
        super().__init__(0, len(everyone), None)
        self._everyone = everyone

    def gather(self, value: Any, what: str, limit: float | None = None) -> list[Any]:
        return [None if each is None else list(each) for each in self._everyone]


def divided(*everyone: Said | None) -> DataRanks:
    group = Told(*everyone)
    divide(group, everyone[0])
    return group.data


@pytest.mark.parametrize(
    ("ranks", "covers"),
    [([0, 2], True), ([1, 2], True), ([0, 1, 2, 3], True), ([0], False), ([0, 1], False), ([0, 1, 2], False)],
)
def test_a_mean_over_ranks_counts_each_part_equally_often(ranks: list[int], covers: bool) -> None:
    assert DataRanks([0, 0, 1, 1]).covered_by(ranks) is covers


def test_what_one_rank_says() -> None:
    assert said(None) is None
    assert said(1) == said((0, 1)) == said([0, 1]) == Said(0, 1)
    assert said((1, 2)) == Said(1, 2)


ROW, OTHER = (0, 2), (1, 3)

DIVIDED: dict[tuple[Said | None, ...], tuple[tuple[int, ...], bool, bool, tuple[int, ...]]] = {
    (None, None, None): ((0, 1, 2), False, True, (0, 1, 2)),
    (Said(1, 2), Said(0, 2)): ((1, 0), False, False, (1, 0)),
    tuple(Said(place, 2) for place in (0, 0, 1, 1)): ((0, 0, 1, 1), True, False, (0, 2)),
    (Said(0, 2, ROW), Said(0, 2, OTHER), Said(1, 2, ROW), Said(1, 2, OTHER)): (
        (0, 0, 1, 1),
        True,
        False,
        (0, 2),
    ),
}


@pytest.mark.parametrize("everyone", DIVIDED)
def test_what_fits_divides_the_data(everyone: tuple[Said | None, ...]) -> None:
    data = divided(*everyone)
    assert (data.of, data.shared, data.in_order, data.first) == DIVIDED[everyone]
    if data.shared:
        assert data.together(3) == (2, 3)
        assert data.unlike("aabb") == () and data.unlike("axby") == (1, 3)


REFUSED = {
    "the sizes": ([Said(0, 1), Said(0, 2)], DisagreementError, "1 part on rank 0, and 2 parts on rank 1"),
    "one alone": ([Said(0, 1), None], DisagreementError, "1 part on rank 0, and no value on rank 1"),
    "the counts": ([Said(0, 2), Said(0, 2), Said(1, 2)], ConfigError, "it is 0 of 2, 1 of 1"),
    "nobody": ([Said(0, 2)], ConfigError, "it is 0 of 1, 1 of 0"),
    "a rank outside": ([Said(0, 2, (0, 1)), Said(None, 2, (0, 1))], ConfigError, "rank 0 is a mesh"),
    "a larger mesh": ([Said(0, 2, (0, 5)), Said(1, 2, (0, 5))], ConfigError, "mesh of the ranks 0, 5"),
    "other rows": ([Said(0, 2, (0, 1)), Said(1, 2, (1, 0))], ConfigError, "does not fit the 2 ranks"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_ranks_say_has_to_fit(what: str) -> None:
    everyone, kind, words = REFUSED[what]
    with pytest.raises(kind, match=words):
        divided(*everyone)


class Telling(Group):
    """A rank that gives what the writer has told to the ranks that come after it."""

    told: ClassVar[list[Any]] = []

    def gather(self, value: Any, what: str, limit: float | None = None) -> list[Any]:
        if self.writer:
            self.told[:] = [json.loads(json.dumps(value))]
        return self.told


@pytest.mark.parametrize("of", [(0, 0, 1, 1), (1, 1, 0, 0), (1, 0), (0, 1)])
def test_each_part_begins_with_random_numbers_of_its_own(of: tuple[int, ...]) -> None:
    drawn: dict[int, set[tuple[float, ...]]] = {}
    with isolated():
        seed_all(0)
        alone = draws()
        for rank, part in enumerate(of):
            seed_all(0)
            group = Telling(rank, len(of), None)
            group.data = DataRanks(of)
            begin_random(group, 7)
            drawn.setdefault(part, set()).add(draws())
    assert drawn[0] == {alone} and len(drawn[1]) == 1 and not drawn[0] & drawn[1]


def draws() -> tuple[float, ...]:
    return random.random(), np.random.random()


LAYOUTS = {
    (0, 1, 2, 3): "",
    (0, 0, 0, 0): "batches in 1 part",
    (0, 0, 1, 1): "batches in 2 parts",
    (0, 1, 0, 1): "batches in 2 parts (ranks read the parts 0, 1, 0, 1)",
    (1, 0, 2, 3): "batches in 4 parts (ranks read the parts 1, 0, 2, 3)",
}


@pytest.mark.parametrize("of", LAYOUTS)
def test_other_parts_on_as_many_ranks_are_another_layout(of: tuple[int, ...]) -> None:
    assert layout(fingerprint({}, DataRanks(of))) == LAYOUTS[of]


@pytest.mark.parametrize("given", [None, 1, (0, 1)])
def test_one_process_reads_everything(given: Any, tmp_path: Path) -> None:
    with everstep.TrainLoop(tmp_path / "run", {"w": np.zeros(1)}, max_epoch=1, data_ranks=given) as loop:
        for _ in loop.iter_epochs():
            drawn = [
                ids.tolist()
                for _, (ids,) in loop.iter_steps(everstep.data.arrays(np.arange(4), batch_size=2))
            ]
        assert (loop.data_rank, loop.data_ranks) == (0, 1)
    assert drawn == [[0, 1], [2, 3]]
