"""Streams over samples, iterated by themselves: as long as they say, each time the same, nothing moves."""

from __future__ import annotations

import multiprocessing
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from everstep.data import arrays, loader
from everstep.testing.stream_checks import fingerprint

X = np.arange(22, dtype=np.float32).reshape(11, 2)


class Augmented(torch.utils.data.Dataset[Any]):
    """11 samples, each with noise from the three global generators."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()])


MAKERS = {
    "arrays": lambda **options: arrays(X, batch_size=4, **options),
    "loader": lambda **options: loader(Augmented(), 4, **options),
    "workers": lambda **options: loader(Augmented(), 4, num_workers=2, **options),
}


def global_state() -> Any:
    return fingerprint([random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()])


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize(("drop_last", "batches"), [(False, 3), (True, 2)])
def test_the_length_is_the_batches_of_a_pass(make: Any, drop_last: bool, batches: int) -> None:
    stream = make(drop_last=drop_last)
    assert len(stream) == len(list(stream)) == batches


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_same_pass_each_time_and_no_global_state_moves(make: Any) -> None:
    stream = make(shuffle=True)
    before = global_state()
    first = fingerprint(list(stream))
    assert fingerprint(list(stream)) == fingerprint(list(make(shuffle=True))) == first
    assert global_state() == before
    assert fingerprint(list(make(shuffle=True, seed=1))) != first


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_pass_that_is_left_leaves_nothing_behind(make: Any) -> None:
    batches = iter(make())
    next(batches)
    batches.close()
    assert not multiprocessing.active_children()
    assert not [thread for thread in threading.enumerate() if "everstep" in thread.name]
