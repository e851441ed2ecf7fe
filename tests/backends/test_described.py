"""What of a function or an object is compared at a resume, and what is not."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch

from everstep.backends.describe_values import described, is_unknown
from everstep.contracts.services import Moment


def texts(value: Any) -> dict[str, str]:
    return described(value, "f")


class Warmup:
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, step: int) -> float:
        return step / self.length

    def half(self, step: int) -> float:
        return self(step) / 2


def test_source_counts_without_comments_and_layout() -> None:
    def rate(step: int) -> int:
        return 2 * step

    one = texts(rate)

    def rate(step: int) -> int:  # type: ignore[no-redef]
        # doubled

        return 2 * step

    assert texts(rate) == one

    def rate(step: int) -> int:  # type: ignore[no-redef]
        return 3 * step

    assert texts(rate)["f"] == one["f"] == "rate"
    assert texts(rate)["code of f"] != one["code of f"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2.0, "a"], [1, 2, "a"]),
        (np.arange(3), np.arange(1, 4)),
        (torch.zeros(1000), torch.ones(1000)),
        ({"a": 1}, {"a": 2}),
        ({"a", "b"}, {"a", "c"}),
        (range(3), range(4)),
        (Moment.AFTER_STEP, Moment.AFTER_EPOCH),
        (Warmup(3), Warmup(4)),
        (math.cos, math.sin),
        (functools.partial(math.pow, 2), functools.partial(math.pow, 3)),
        (
            functools.partial(max, key=lambda step: step),
            functools.partial(max, key=lambda step: -step),
        ),
        (
            lambda step, w=1: w,
            lambda step, w=2: w,
        ),
        (
            lambda step: [n * 2 for n in range(step)],
            lambda step: [n * 3 for n in range(step)],
        ),
    ],
)
def test_what_does_otherwise_has_other_texts(one: Any, other: Any) -> None:
    assert texts(one) == texts(one) != texts(other)
    assert not any(map(is_unknown, texts(one).values()))


def test_what_comes_with_a_package_goes_by_its_name() -> None:
    assert texts(functools.partial(math.pow, 2)) == {"f": "math.pow", "f.0": "2"}
    assert texts(torch.nn.functional.relu) == {"f": "torch.nn.functional.relu"}


def test_what_cannot_be_compared_says_what_it_is() -> None:
    warmup = Warmup(3)
    warmup.me = warmup  # type: ignore[attr-defined]
    assert texts(warmup)["f.me"] == "not compared, an object of test_described.Warmup"
    assert is_unknown(texts(torch.nn.Linear(1, 1))["f"])  # it is state
    assert is_unknown(texts(torch.eye(2).to_sparse())["f"])
    assert texts([object()] * 101)["f"] == "not compared, 101 objects in a list"
    assert "code of f" in texts(warmup.half) and "code of f" in texts(warmup)
    made: dict[str, Any] = {}
    exec(compile("def made(step):\n    return step", "<made>", "exec"), made)
    assert texts(made["made"])["code of f"] == "not compared, the source of made is not known"
