"""`arrays`: batches from memory; and the order of samples, which every stream of ours has."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.contracts.data import Cursor
from everstep.data import arrays
from everstep.data.order import Sampling, key_at, pass_key, permutation
from everstep.errors import UsageError
from everstep.testing.checks import check_stream

X = np.arange(22, dtype=np.float32).reshape(11, 2)
Y = torch.arange(11)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_laws(shuffle, drop_last):
    check_stream(lambda: arrays(X, Y, batch_size=3, shuffle=shuffle, drop_last=drop_last))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.rand(11),
        lambda: torch.rand(11, 3, 4, 4),
        lambda: torch.rand(11, 3, 4, 4).to(memory_format=torch.channels_last),
        lambda: torch.rand(2, 11).T,
        lambda: torch.rand(22, 2)[::2],
        lambda: torch.rand(11, 2) > 0.5,
        lambda: torch.rand(11, 2, dtype=torch.complex64),
        lambda: torch.nn.Parameter(torch.rand(11, 2)),
        lambda: np.random.default_rng(0).random((11, 2), np.float32)[:, ::-1],
        lambda: np.array([f"word {n}" for n in range(11)]),
        lambda: np.ma.masked_less(np.arange(11), 4),
    ],
    ids=[f"layout-{number}" for number in range(11)],
)
def test_a_batch_is_what_an_index_in_brackets_gives(make):
    samples = make()
    stream = arrays(samples, batch_size=4, shuffle=True, seed=3)
    for at, [batch] in enumerate(stream.open("train", 0, seed=0)):
        expected = samples[stream.sample_ids("train", 0, at, seed=0)]
        assert type(batch) is type(expected) and batch.dtype == expected.dtype
        assert batch.tolist() == expected.tolist()
        if isinstance(batch, torch.Tensor):
            assert batch.stride() == expected.stride() and batch.requires_grad == expected.requires_grad


def test_own_seed_wins_and_purpose_matters():
    def order(stream, purpose="train", pass_index=0, seed=0):
        return [int(i) for [y] in stream.open(purpose, pass_index, seed=seed) for i in y]

    keyed, free = arrays(Y, batch_size=4, shuffle=True, seed=5), arrays(Y, batch_size=4, shuffle=True)
    assert order(keyed, seed=1) == order(keyed, seed=2) == order(free, seed=5)
    assert order(free, seed=1) != order(free, seed=2)
    assert order(free, "valid") != order(free) != order(free, pass_index=1)


def test_remaining_and_position_count_batches_handed_out():
    cursor: Cursor = arrays(X, batch_size=4).open("train", 0, seed=0)
    next(cursor)
    assert cursor.remaining() == 2
    assert cursor.position()["batches"] == 1
    cursor.close()
    assert cursor.position()["batches"] == 1
    with pytest.raises(UsageError, match="closed after 1 batches; open a new one"):
        next(cursor)


# ------------------------------------------------------------------------------------------- order


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
