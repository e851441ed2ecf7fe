"""The protocol of the agreement, by a search through all that can happen; and the search has teeth."""

from __future__ import annotations

import pytest
from agreement_model import MISTAKES, NEVER, Model, Wrong, search


@pytest.mark.parametrize(
    ("model", "wishes", "deaths"),
    [
        (Model(2, last=3, apart=0), 2, 0),
        (Model(2, last=3, apart=2), 1, 1),
        (Model(2, last=3, apart=2, due=2), 1, 0),
        (Model(3, last=2, apart=0), 1, 0),
    ],
)
def test_whatever_happens_all_ranks_stop_at_one_step(model: Model, wishes: int, deaths: int) -> None:
    found = search(model, wishes, deaths)
    assert found.agreements == wishes, "no history has as many agreements as wishes"


@pytest.mark.campaign("long")
@pytest.mark.parametrize(
    ("model", "wishes", "deaths"),
    [
        (Model(2, last=4, apart=2), 2, 1),
        (Model(2, last=4, apart=NEVER, due=2), 2, 0),
        (Model(3, last=2, apart=2), 1, 0),
        (Model(3, last=2, apart=0), 1, 1),
    ],
)
def test_longer_histories_too(model: Model, wishes: int, deaths: int) -> None:
    assert search(model, wishes, deaths).agreements == wishes


@pytest.mark.parametrize(("mistake", "apart"), MISTAKES.items())
def test_a_mistake_is_found(mistake: str, apart: int) -> None:
    with pytest.raises(Wrong):
        search(Model(2, last=3, apart=apart, mistake=mistake), wishes=2)
