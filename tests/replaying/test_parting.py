"""Of the parts that differ the first is the first by cause and effect, in whatever order they are told."""

from __future__ import annotations

import pytest

from everstep.replaying.diverge import first_parting

SAME = {
    "weights before/model/0.weight": "1",
    "data/0": "1",
    "random before/torch": "1",
    "input inside/1/model/0": "1",
    "loss/loss": "1",
    "gradient inside/1/optimizer/model/0.weight": "1",
    "optimizer inside/1/optimizer/options/0/lr": "1",
    "random after/torch": "1",
    "weights after/model/0.weight": "1",
    "optimizer after/optimizer/state": "1",
}


@pytest.mark.parametrize(
    ("changed", "component", "name"),
    [
        (["loss/loss", "data/0", "weights after/model/0.weight"], "data", "0"),
        (["weights after/model/0.weight"], "update", "model/0.weight"),
        (["optimizer after/optimizer/state", "gradient inside/1/optimizer/model/0.weight"], "gradient", None),
        (["loss/loss", "random after/torch"], "random state", "torch"),
        (["optimizer inside/1/optimizer/options/0/lr", "weights after/model/0.weight"], "optimizer", None),
    ],
)
def test_causes_come_before_effects(changed: list[str], component: str, name: str | None) -> None:
    other = SAME | dict.fromkeys(changed, "2")
    found = first_parting({7: SAME, 8: SAME, 9: SAME}, {7: SAME, 8: other, 9: other})
    assert found is not None and (found.step, found.component) == (8, component)
    assert name in (None, found.parts[0].name)
    assert len(found.parts) == len(changed)


def test_equal_steps_do_not_part_and_a_part_of_only_one_side_does() -> None:
    assert first_parting({1: SAME}, {1: dict(SAME), 2: {}}) is None
    found = first_parting({1: SAME}, {1: SAME | {"gradient inside/1/optimizer/model/0.bias": "1"}})
    assert found is not None and found.component == "gradient"


def test_an_update_that_only_one_side_made_is_a_part_of_the_update() -> None:
    other = {place: digest for place, digest in SAME.items() if "inside/1/optimizer" not in place}
    found = first_parting({3: SAME}, {3: other | {"weights after/model/0.weight": "2"}})
    assert found is not None and found.component == "update"
    assert found.parts[0].where == "an update that only one of them made"


TWO_MODELS = (
    "input inside/1/critic/0",
    "weights inside/1/critic/0.bias",
    "pull inside/1/critic",
    "gradient inside/1/judging/critic/0.bias",
    "optimizer inside/1/judging/options/0/weight_decay",
    "input inside/2/critic/0",
    "weights inside/2/critic/0.bias",
    "pull inside/2/critic",
    "gradient inside/1/making/maker/0.bias",
    "optimizer inside/1/making/options/0/weight_decay",
    "loss/critic",
    "weights after/critic/0.bias",
)
"""Two models and two updates in a step, in the order of time."""


@pytest.mark.parametrize(
    ("first", "begin"),
    [
        ("weights inside/1/critic/0.bias", 1),
        ("loss/critic", 2),  # another loss is seen by what it asks of the model's output
        ("gradient inside/1/judging/critic/0.bias", 3),  # clipped otherwise, say
        ("optimizer inside/1/judging/options/0/weight_decay", 4),
    ],
)
def test_in_a_step_with_two_updates_time_decides(first: str, begin: int) -> None:
    """What the first update changes is seen by the second forward pass and a loss, which are no causes."""
    same = dict.fromkeys(TWO_MODELS, "1")
    changed = TWO_MODELS[begin:]
    found = first_parting({4: same}, {4: same | dict.fromkeys(changed, "2")})
    assert found is not None and found.parts[0].place == first
    places = [part.place for part in found.parts if part.place != "loss/critic"]
    assert places == [each for each in changed if not each.startswith(("pull", "loss"))]


def test_a_gradient_that_waits_is_seen_in_its_own_step() -> None:
    same = dict.fromkeys(("loss/loss", "gradient after/torch/model/0.weight"), "1")
    found = first_parting({4: same}, {4: same | {"gradient after/torch/model/0.weight": "2"}})
    assert found is not None and (found.step, found.component) == (4, "gradient")
