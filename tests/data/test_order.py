"""Order and keys: pure, frozen, and independent of everything else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.data.order import Sampling, key_at, pass_key, permutation
from everstep.errors import ConfigError


def test_golden_values_never_change():
    assert permutation(8, 0, "train", 0).tolist() == GOLDEN_ORDER
    assert sample_key(0, "train", 0, 0) == GOLDEN_KEY


def sample_key(seed, purpose, pass_index, position):
    return key_at(pass_key("sample", seed, purpose, pass_index), position)


GOLDEN_ORDER = [0, 4, 7, 3, 2, 6, 1, 5]
GOLDEN_KEY = 2743965348293048278


@given(st.integers(0, 300), st.integers(-5, 2**70), st.text(max_size=5), st.integers(0, 10))
@settings(max_examples=50, deadline=None)
def test_a_permutation_is_one_and_is_pure(length, seed, purpose, pass_index):
    order = permutation(length, seed, purpose, pass_index)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(length))
    assert np.array_equal(order, permutation(length, seed, purpose, pass_index))
    # each part of the key matters
    wheres = [(seed, purpose, pass_index), (seed + 1, purpose, pass_index), (seed, purpose + "x", pass_index)]
    wheres.append((seed, purpose, pass_index + 1))
    assert len({sample_key(*where, 0) for where in wheres} | {sample_key(*wheres[0], 1)}) == 5
    assert length < 30 or len({tuple(permutation(length, *where)) for where in wheres}) == 4


@pytest.mark.parametrize(
    ("length", "batch_size", "drop_last", "sizes"),
    [
        (10, 4, False, [4, 4, 2]),
        (10, 4, True, [4, 4]),
        (8, 4, True, [4, 4]),
        (3, 5, False, [3]),
        (3, 5, True, []),
    ],
)
def test_batches_of_a_plan(length, batch_size, drop_last, sizes):
    plan = Sampling("x", length, batch_size, True, None, drop_last).plan("train", 0, 0)
    assert [len(plan.indices(batch)) for batch in range(len(plan))] == sizes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: give an integer, 1 or more"),
        ({"seed": "x"}, "seed='x': give an integer, or None"),
    ],
)
def test_bad_arguments(change, message):
    good = {"kind": "x", "length": 3, "batch_size": 1, "shuffle": False, "seed": None, "drop_last": False}
    with pytest.raises(ConfigError, match=message):
        Sampling(**{**good, **change})
