"""A function is what it does: what of it is compared at a resume, and what is not."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from everstep.backends.describe_values import described, is_unknown, other_python
from everstep.contracts.services import Moment

ARGS = argparse.Namespace(epochs=40, run_dir="here")
CONFIG = {"warmup": 3, "folder": "there"}
TABLE = [0.1, 0.2]


def texts(value: Any) -> dict[str, str]:
    return described(value, "f")


class Policy:
    """An object with more than its schedule reads."""

    scale = 2.0

    def __init__(self, total: int, folder: str = "") -> None:
        self.total, self.folder, self.model = total, folder, torch.nn.Linear(1, 1)

    @property
    def half(self) -> float:
        return self.total / 2

    def rate(self, step: int) -> float:
        return self.helper(step) * self.half

    def helper(self, step: int) -> float:
        return step / self.total


def around(value: Any) -> Callable[[int], Any]:
    return lambda step: value * step


def test_names_that_the_code_reads_count_and_their_neighbours_do_not() -> None:
    found = texts(lambda step: step / ARGS.epochs * CONFIG["warmup"] * TABLE[0] * math.cos(step))
    assert found.pop("code of f")
    assert found == {
        "f": "<lambda>", "f.ARGS.epochs": "40", "f.CONFIG.warmup": "3", "f.TABLE.0": "0.1"
    }  # fmt: skip


def test_a_method_counts_with_what_it_and_its_helpers_read() -> None:
    found, other = texts(Policy(4, "a").rate), texts(Policy(4, "b").rate)
    assert found == other and not any(map(is_unknown, found.values()))
    assert texts(Policy(5).rate) != found
    assert found["f.self.helper.self.total"] == found["f.self.half.self.total"] == "4"


def test_code_counts_without_its_docstring_and_the_names_of_its_own_variables() -> None:
    def one(step: int) -> int:
        """One."""
        double = 2 * step
        return double

    def two(step: int) -> int:
        """Two."""
        twice = 2 * step
        return twice

    def three(step: int) -> int:
        twice = 3 * step
        return twice

    codes = [texts(function)["code of f"] for function in (one, two, three)]
    assert codes[0] == codes[1] != codes[2]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (around(2), around(3)),
        (around(np.arange(3)), around(np.arange(1, 4))),
        (around(torch.zeros(1000)), around(torch.ones(1000))),
        (around(around(2)), around(around(3))),
        (around({"a": 1}), around({"a": 2})),
        (around(range(3)), around(range(4))),
        (around(Moment.AFTER_STEP), around(Moment.AFTER_EPOCH)),
        (lambda step, w=1: w, lambda step, w=2: w),
        (functools.partial(math.pow, 2), functools.partial(math.pow, 3)),
        (functools.partial(max, key=around(1)), functools.partial(max, key=around(2))),
        (math.cos, math.sin),
        (lambda step: [n * 2 for n in range(step)], lambda step: [n * 3 for n in range(step)]),
        (lambda step: step in {"a", "b"}, lambda step: step in {"a", "c"}),
    ],
)
def test_what_does_otherwise_has_other_texts(one: Any, other: Any) -> None:
    assert texts(one) == texts(one) != texts(other)
    assert not any(map(is_unknown, texts(one).values()))


def test_what_comes_with_a_package_goes_by_its_name() -> None:
    assert texts(functools.partial(math.pow, 2)) == {"f": "math.pow", "f.0": "2"}
    assert texts(torch.nn.functional.relu) == {"f": "torch.nn.functional.relu"}


def test_recursion_ends() -> None:
    def down(step: int) -> int:
        return step and down(step - 1)

    class Knot:
        def __init__(self) -> None:
            self.me = self

        def __call__(self, step: int) -> int:
            return step

    assert texts(down)["f"] == "down" and texts(Knot())["f"].endswith("Knot")


def test_what_cannot_be_compared_says_what_it_is() -> None:
    found = texts(around(object()))
    assert found["f.value"] == "not compared, an object of object" and is_unknown(found["f.value"])
    assert is_unknown(texts(torch.nn.Linear(1, 1))["f"])  # it is state
    assert is_unknown(texts(around(torch.eye(2).to_sparse()))["f.value"])
    assert texts(around([object()] * 101))["f.value"] == "not compared, 101 objects in a list"


def test_code_of_two_pythons_is_no_difference() -> None:
    ours = texts(around(2))["code of f"]
    other = ours.replace("(Python 3", "(Python 2")
    assert other_python(ours, other) and not other_python(ours, ours)
    assert not other_python(ours, "f" * 16 + ours[16:]) and not other_python("1", "2")
