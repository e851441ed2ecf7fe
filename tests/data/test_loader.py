"""`everstep.data.loader`: order, samples and augmentation, whatever the workers do; streams read alone."""

import multiprocessing
import random
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from everstep.data import arrays, loader
from everstep.testing.checks import check_stream, fingerprint


class Augmented(Dataset):
    """11 samples, each with noise from the three global generators."""

    def __len__(self):
        return 11

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()])


def noisy_collate(samples):
    return torch.stack(samples), random.random(), np.random.rand(), torch.rand(2)


def batches(stream, purpose="train", pass_index=0, position=None, seed=0):
    cursor = stream.open(purpose, pass_index, position, seed=seed)
    taken = list(cursor)
    cursor.close()
    return fingerprint(taken)


def make(**options):
    return loader(Augmented(), 3, shuffle=True, collate_fn=noisy_collate, **options)


def test_laws():
    check_stream(make, shares=False)
    check_stream(lambda: loader(Augmented(), 3, shuffle=True))


def test_laws_with_workers():
    full = [batches(make(), pass_index=p) for p in range(2)]
    for pass_index in range(2):
        cursor = make(num_workers=2).open("train", pass_index, seed=0)
        head = [next(cursor), next(cursor)]
        position = cursor.position()
        cursor.close()
        for workers in ({}, {"num_workers": 1}, {"num_workers": 2, "prefetch_factor": 5}):
            rest = batches(make(**workers), "train", pass_index, position)
            assert fingerprint(head)[1] + rest[1] == full[pass_index][1]


def test_augmentation_differs_between_passes_samples_and_seeds():
    def noise(**where):
        return np.concatenate([b[0] for b in make().open(**where)])[:, 1:]

    first = noise(purpose="train", pass_index=0, seed=0)
    assert len(np.unique(first)) == first.size
    for other in ({"pass_index": 1}, {"seed": 1}, {"purpose": "valid"}):
        again = noise(**{"purpose": "train", "pass_index": 0, "seed": 0, **other})
        assert not np.isin(again, first).any()


def mark_dataset(worker_id):
    get_worker_info().dataset.mark = worker_id + 10


class Marked(Augmented):
    mark = 0

    def __getitem__(self, index):
        return self.mark


def test_worker_init_fn_runs_and_sees_the_users_dataset():
    [batch, *_] = loader(Marked(), 3, num_workers=1, worker_init_fn=mark_dataset).open("t", 0, seed=0)
    assert batch.tolist() == [10, 10, 10]


@pytest.mark.campaign("long")
def test_workers_started_anew_give_the_same():
    assert batches(make(num_workers=1, multiprocessing_context="spawn")) == batches(make())


class Drawing(Augmented):
    def __getitem__(self, index):
        torch.rand(3)
        return super().__getitem__(index)


def test_collate_has_random_state_of_its_own():
    one, other = (
        loader(d, 3, collate_fn=noisy_collate).open("t", 0, seed=0) for d in (Augmented(), Drawing())
    )
    for left, right in zip(one, other, strict=True):
        assert fingerprint(left[1:]) == fingerprint(right[1:])


class Broken(Augmented):
    def __getitem__(self, index):
        if index == 4:
            raise KeyError("sample 4 is missing")
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_the_datasets_error_arrives_at_its_batch(workers):
    cursor = loader(Broken(), 3, num_workers=workers).open("train", 0, seed=0)
    assert next(cursor).tolist() == [0, 1, 2]
    with pytest.raises(KeyError, match="sample 4 is missing"):
        next(cursor)
    assert cursor.position()["batches"] == 1


ALONE = {
    "arrays": lambda **options: arrays(np.arange(22.0).reshape(11, 2), batch_size=4, **options),
    "loader": lambda **options: loader(Augmented(), 4, **options),
    "workers": lambda **options: loader(Augmented(), 4, num_workers=2, **options),
}


@pytest.mark.parametrize("kind", ALONE)
def test_iterated_by_itself_it_is_as_long_as_it_says_and_each_time_the_same(kind):
    def global_state():
        return fingerprint([random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()])

    stream = ALONE[kind](shuffle=True)
    before = global_state()
    first = list(stream)
    assert (len(first), len(stream), len(ALONE[kind](drop_last=True))) == (3, 3, 2)
    assert fingerprint(list(stream)) == fingerprint(first)
    assert fingerprint(list(ALONE[kind](shuffle=True, seed=1))) != fingerprint(first)
    left = iter(stream)
    next(left)
    left.close()
    assert global_state() == before and not multiprocessing.active_children()
    assert not [thread for thread in threading.enumerate() if "everstep" in thread.name]
