"""Sequences, iterables, and things that keep their own state."""

import itertools

import numpy as np
import pytest
import torch
from tqdm import tqdm

from everstep.data import as_stream, replay, stateful
from everstep.errors import DataError, NotResumableError
from everstep.testing.stream_checks import check_stream
from tiny_runs import bind


class Fresh:
    """Re-iterable, without state."""

    def __init__(self, n=5):
        self.n = n

    def __iter__(self):
        yield from range(self.n)


class SelfState:
    """Its own iterator; starts anew at the end of a pass; its order depends on all passes before."""

    def __init__(self):
        self.at, self.sum = 0, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == 4:
            self.at = 0
            raise StopIteration
        self.at += 1
        self.sum = self.sum * 3 + self.at
        return self.sum

    def state_dict(self):
        return {"at": self.at, "sum": self.sum}

    def load_state_dict(self, state):
        self.at, self.sum = state["at"], state["sum"]


class Epochs:
    """A dataset as Hugging Face has it: `state_dict` and `set_epoch`, the state names its epoch."""

    def __init__(self):
        self.epoch, self.starting, self.state = 0, None, {"epoch": 0, "at": 0}

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        start = self.starting["at"] if self.starting and self.starting["epoch"] == self.epoch else 0
        for at in range(start + 1, 6):
            self.state = {"epoch": self.epoch, "at": at}
            yield self.epoch * 100 + at

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.starting = self.state = state


class Streaming:
    """A dataset as streaming libraries have it: the number of samples is told to it."""

    def __init__(self):
        self.start = 0

    def __iter__(self):
        start, self.start = self.start, 0
        yield from range(start, 6)

    def state_dict(self, num_samples, from_beginning):
        assert from_beginning
        return {"sample_in_epoch": num_samples}

    def load_state_dict(self, state):
        self.start = state["sample_in_epoch"]


class GrainLike:
    """Its iterators have `get_state` and `set_state`."""

    class Iterator:
        def __init__(self):
            self.at = 0

        def __iter__(self):
            return self

        def __next__(self):
            if self.at == 5:
                raise StopIteration
            self.at += 1
            return np.full(2, self.at)

        def get_state(self):
            return str(self.at).encode()

        def set_state(self, state):
            self.at = int(state)

    def __iter__(self):
        return self.Iterator()


@pytest.mark.parametrize(
    "make",
    [
        lambda: as_stream([1, 2, 3]),
        lambda: as_stream(range(4)),
        lambda: as_stream(([1], [2])),
        lambda: as_stream(SelfState()),
        lambda: stateful(SelfState()),
        lambda: as_stream(Epochs()),
        lambda: stateful(Epochs()),
        lambda: as_stream(Streaming()),
        lambda: as_stream(GrainLike()),
        lambda: stateful(GrainLike()),
        lambda: as_stream(Fresh()),
    ],
)
def test_laws(make):
    check_stream(make)


def test_replay_says_what_it_cost_and_checks_the_end():
    cursor = replay(Fresh()).open("train", 0, seed=0)
    next(cursor), next(cursor)
    again = replay(Fresh()).open("train", 0, cursor.position(), seed=0)
    assert again.note.startswith("data 'train' (Fresh): replayed 2 batches in 0.")
    assert list(again) == [2, 3, 4]
    with pytest.raises(DataError, match="ended after 1 batches, but the checkpoint stands after 2"):
        replay(Fresh(1)).open("train", 0, cursor.position(), seed=0)


def test_an_iterator_gives_one_pass():
    stream = as_stream(iter([1, 2]))
    assert list(stream.open("train", 0, seed=0)) == [1, 2]
    with pytest.raises(DataError, match="exhausted: an iterator gives one pass, and pass 2 was to begin"):
        stream.open("train", 1, seed=0)


def test_an_iterator_that_goes_back_to_the_start_may_go_on():
    class Again:
        def __iter__(self):
            self.at = 0
            return self

        def __next__(self):
            self.at += 1
            if self.at > 2:
                raise StopIteration
            return self.at

    class Once(Again):
        at = 0

        def __iter__(self):
            return self

    stream = as_stream(Again())
    assert [list(stream.open("train", p, seed=0)) for p in range(2)] == [[1, 2], [1, 2]]
    stream = as_stream(Once())
    list(stream.open("train", 0, seed=0))
    with pytest.raises(DataError, match="exhausted"):
        next(stream.open("train", 1, seed=0))


def test_an_error_ends_the_cursor():
    def broken():
        yield 1
        raise KeyError("disk")

    cursor = as_stream(broken()).open("train", 0, seed=0)
    next(cursor)
    with pytest.raises(KeyError, match="disk"):
        next(cursor)
    with pytest.raises(DataError, match="fetching batch 1 failed"):
        next(cursor)


def test_generators_are_closed():
    closed = []

    class Source:
        def __iter__(self):
            try:
                yield from range(3)
            finally:
                closed.append(True)

    cursor = as_stream(Source()).open("train", 0, seed=0)
    next(cursor)
    cursor.close()
    assert closed == [True]


class Samples:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("digits.npz", r"str 'digits.npz' does not give batches.* list of batches"),
        ({"x": 1}, r"dict .*everstep\.data\.arrays\(\*data\.values\(\)"),
        (np.ones(3), r"ndarray .*everstep\.data\.arrays"),
        (torch.ones(3), r"Tensor .*everstep\.data\.arrays"),
        (Samples(), r"Samples .*everstep\.data\.loader"),
        (Fresh, r"type .*give an object: Fresh\(\.\.\.\)"),
        (len, r"builtin_function.*call it"),
        (3, r"int 3 does not give batches.*everstep\.data\.arrays"),
        (None, "NoneType None"),
    ],
)
def test_what_is_no_data(data, message):
    with pytest.raises(DataError, match=message):
        as_stream(data)


@pytest.mark.parametrize(
    ("hidden", "remedy"),
    [
        (lambda data: tqdm(data, disable=True), r"as in tqdm\(loop.iter_steps\(loader\)\)"),
        (lambda data: zip(data, data, strict=True), "StackDataset"),
        (enumerate, "do in the loop what enumerate does"),
        (itertools.cycle, "give the data itself"),
    ],
)
def test_data_whose_place_is_hidden_is_refused_when_it_is_bound(hidden, remedy, tmp_path):
    with pytest.raises(NotResumableError, match=f"stream 'train': .* hides the place.*{remedy}"):
        bind(hidden([1, 2, 3]), tmp_path / "run")
