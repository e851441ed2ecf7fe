"""`arrays`: batches from memory."""

import numpy as np
import pytest
import torch

from everstep.contracts.data import Cursor
from everstep.data import arrays
from everstep.errors import DataError, UsageError
from everstep.testing.stream_checks import check_stream

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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "no array; give it at least one"),
        ((X, Y[:4]), r"different lengths \[11, 4\]"),
        (([1, 2],), "given a list; give NumPy arrays"),
        ((np.float32(3),), "given a float32"),
        ((np.array(3),), r"an array of shape \(\)"),
    ],
)
def test_bad_arrays(given, message):
    with pytest.raises(DataError, match=message):
        arrays(*given, batch_size=2)
