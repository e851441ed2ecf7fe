"""Global random state: taken, put back, isolated."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from everstep.errors import RestoreError
from everstep.state import capture, decode, encode, isolated, rekey, restore, seed_all


def draw() -> list[Any]:
    return [
        random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item(),
        torch.randn(17).tolist(),
    ]  # fmt: skip


@pytest.mark.parametrize("drawn_before", [0, 1])
def test_every_generator_goes_on_where_it_was(drawn_before: int) -> None:
    for _ in range(drawn_before):
        draw()  # an odd number of gauss draws leaves a second value waiting
    tree = decode(encode(capture()))
    expected = [draw() for _ in range(3)]
    restore(tree)
    assert [draw() for _ in range(3)] == expected


def test_isolated_leaves_no_trace_even_after_an_error() -> None:
    tree = capture()
    expected = draw()
    restore(tree)
    with pytest.raises(KeyError), isolated():
        raise KeyError(draw())
    assert draw() == expected


def test_another_numpy_bit_generator_is_kept() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        tree = decode(encode(capture()))
        expected = np.random.rand(3).tolist()
        restore(tree)
        assert np.random.rand(3).tolist() == expected
    finally:
        np.random.set_bit_generator(before)


def test_the_state_of_another_python_is_refused() -> None:
    tree = capture()
    tree["python"]["version"] = 4
    with pytest.raises(RestoreError, match="Python that wrote it"):
        restore(tree)


def test_missing_devices_are_warned_about() -> None:
    tree = capture()
    states = [torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())]
    tree["torch"]["cuda"] = [*states, torch.zeros(16, dtype=torch.uint8)]
    with pytest.warns(UserWarning, match="start it on as many devices"):
        restore(tree)


def test_each_rank_draws_numbers_of_its_own_which_follow_from_seed_rank_and_step() -> None:
    def drawn_by(seed: int, rank: int, step: int = 0) -> tuple[Any, ...]:
        with isolated():
            seed_all(3)
            rekey(seed, rank, step)
            return random.random(), np.random.rand(), torch.rand(1).item()

    places = [(seed, rank, step) for seed in (0, 7, 2**63) for rank in (1, 2, 255) for step in (0, 9)]
    drawn = [drawn_by(*place) for place in places]
    for numbers in zip(*drawn, strict=True):  # in each of the generators
        assert len(set(numbers)) == len(places)
    assert drawn == [drawn_by(*place) for place in places]
    with isolated():
        seed_all(3)
        expected = random.random(), np.random.rand(), torch.rand(1).item()
    assert drawn_by(7, 0) == drawn_by(8, 0, 4) == expected, "rank 0 goes on with its generators"
