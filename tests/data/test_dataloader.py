"""A torch DataLoader as the user wrote it, and torchdata's StatefulDataLoader."""

import itertools
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from everstep.data import as_stream, replay
from everstep.errors import DataError, NotResumableError
from everstep.testing import check
from everstep.testing.checks import check_stream, fingerprint
from tiny_runs import bind

# torchdata calls what this torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Augmented(Dataset):
    """Samples with noise from the three global generators."""

    def __init__(self, n=8):
        self.n, self.fetched = n, 0

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.fetched += 1
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()])


class Lines(IterableDataset):
    """An iterable-style dataset, split among the workers."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for line in range(first, 9, step):
            yield torch.tensor([line, random.random(), torch.rand(()).item()])


class StatefulLines(IterableDataset):
    """Knows its place, and how many passes there were."""

    def __init__(self):
        self.done, self.passes = 0, 0

    def __iter__(self):
        while self.done < 5:
            self.done += 1
            yield self.passes * 100 + self.done
        self.done, self.passes = 0, self.passes + 1

    def state_dict(self):
        return {"done": self.done, "passes": self.passes}

    def load_state_dict(self, state):
        self.done, self.passes = state["done"], state["passes"]


def generator():
    return torch.Generator().manual_seed(5)


class Lazily:
    """Shuffles chunk by chunk, from the global generators, as it goes."""

    def __len__(self):
        return 8

    def __iter__(self):
        for chunk in (0, 4):
            yield from torch.randperm(4) + chunk


class InPlace(Lazily):
    """Shuffles the batches of its own list in place, as deepspeech.pytorch's sampler does."""

    def __init__(self):
        self.bins, self.passes = [[0, 1, 2], [3, 4, 5], [6, 7]], 0

    def __len__(self):
        return 3

    def __iter__(self):
        for batch in self.bins:
            np.random.shuffle(batch)
            yield batch
        self.passes += 1


class Later(Lazily):
    """Shuffles its own list, but for the first pass."""

    def __init__(self):
        self.order, self.after_the_first = [*range(8)], False

    def __iter__(self):
        if self.after_the_first:
            random.shuffle(self.order)
        self.after_the_first = True
        return iter([*self.order])


class Counting(Lazily):
    """Its order follows from its own count of passes, and its state is that count."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        return iter(torch.randperm(8, generator=torch.Generator().manual_seed(self.passes)))

    def state_dict(self):
        return {"passes": self.passes}

    def load_state_dict(self, state):
        self.passes = state["passes"]


class Endless(Counting):
    """Says nothing of its length."""

    __len__ = None


class Forgetful(Counting):
    """Counts its passes, and says nothing of its length, nor of its state."""

    __len__ = state_dict = load_state_dict = None


class Empty(Counting):
    """Has a state, and passes without a sample."""

    def __len__(self):
        return 0

    def __iter__(self):
        return iter(())


class Unsized(Sampler):
    """Says nothing of its length; its first draw decides the pass."""

    def __iter__(self):
        return iter(torch.randperm(8).tolist())


data = Augmented()
MAKERS = {
    "in order": lambda loader: loader(data, batch_size=3),
    "shuffled": lambda loader: loader(data, batch_size=3, shuffle=True),
    "own generator": lambda loader: loader(data, batch_size=3, shuffle=True, generator=generator()),
    "drop last": lambda loader: loader(data, batch_size=3, shuffle=True, drop_last=True),
    "no batches": lambda loader: loader(data, batch_size=None),
    "replacement": lambda loader: loader(
        data,
        batch_size=20,
        sampler=RandomSampler(data, replacement=True, num_samples=70, generator=generator()),
    ),
    "subset": lambda loader: loader(data, batch_size=2, sampler=SubsetRandomSampler([1, 3, 5, 6, 7])),
    "batches of indices": lambda loader: loader(data, batch_sampler=[np.array([5, 2]), np.array([0, 7])]),
    "weighted": lambda loader: loader(data, batch_size=3, sampler=WeightedRandomSampler([1.0] * 8, 8)),
    "iterable": lambda loader: loader(Lines(), batch_size=2),
    "lazily": lambda loader: loader(data, batch_size=3, sampler=Lazily()),
    "its own list in place": lambda loader: loader(data, batch_sampler=InPlace()),
    "its own list from the second pass on": lambda loader: loader(data, batch_size=3, sampler=Later()),
    "a state of its own": lambda loader: loader(data, batch_size=3, sampler=Counting()),
    "no length": lambda loader: loader(data, batch_size=3, sampler=Unsized()),
    "no length, and a count": lambda loader: loader(data, batch_size=3, sampler=Forgetful()),
    "an array": lambda loader: loader(data, batch_size=3, sampler=np.arange(8)[::-1].copy()),
    "keys": lambda loader: loader(data, batch_size=3, sampler=dict.fromkeys(range(8)).keys()),
    "single samples": lambda loader: loader(data, batch_size=None, sampler=Counting()),
}


@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_laws(make, loader):
    check_stream(lambda: as_stream(make(loader)))


WORKERS = {
    "map": lambda loader, own: loader(Augmented(4), 2, shuffle=True, num_workers=2, generator=own),
    "iterable": lambda loader, own: loader(Lines(), 2, num_workers=2),
    "lazily": lambda loader, own: loader(
        Augmented(), 1, sampler=Lazily(), num_workers=1, prefetch_factor=1, generator=own
    ),
}


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("kind", WORKERS)
def test_laws_with_workers(kind, loader):
    def passes(stop):
        """The batches of two passes; the run stops at this place, and goes on in another process."""
        own, taken = generator(), []
        torch.manual_seed(3)
        stream = as_stream(WORKERS[kind](loader, own))
        for pass_index in range(2):
            cursor = stream.open("train", pass_index, seed=0)
            while (batch := next(cursor, None)) is not None:
                taken.append(batch)
                torch.rand(7)  # as dropout draws
                if len(taken) == stop:
                    position, state = cursor.position(), torch.get_rng_state()
                    cursor.close()
                    own.manual_seed(9)
                    cursor = stream.open("train", pass_index, position, seed=0)
                    torch.set_rng_state(state)
            cursor.close()
        return fingerprint(taken)

    assert passes(1) == passes(0)


class Bag:
    """Looks like a dataset."""

    def __init__(self):
        self.items = [*range(8)]

    def __getitem__(self, index):
        return self.items[index]

    def shuffled(self):
        random.shuffle(self.items)
        return self.items


class Strings(list):
    def shuffled(self):
        random.shuffle(self)
        return self


def forever():
    draw = random.Random(1)
    while True:
        yield draw.randrange(8)


class Hidden(Lazily):
    """Draws a pass by a function of what it keeps, which no checkpoint can hold."""

    passes = 0

    def __init__(self, hidden, draw):
        self.hidden, self.draw = hidden, draw

    def __iter__(self):
        return iter([*self.draw(self)])


def counted(sampler):
    type(sampler).passes += 1
    return np.random.default_rng(type(sampler).passes).permutation(8).tolist()


HIDDEN = {
    "hidden' (SimpleNamespace)": (SimpleNamespace(order=Bag()), lambda it: it.hidden.order.shuffled()),
    "hidden' (list)": ([generator()], lambda it: torch.randperm(8, generator=it.hidden[0]).tolist()),
    "hidden' (Strings)": (Strings(range(8)), lambda it: it.hidden.shuffled()),
    "hidden' (Bag)": (Bag(), lambda it: it.hidden.shuffled()),
    "hidden' (generator)": (forever(), lambda it: itertools.islice(it.hidden, 8)),
    "Hidden.passes' (int)": (None, counted),
}


@pytest.mark.parametrize("what", HIDDEN)
def test_what_a_sampler_changes_and_no_checkpoint_can_hold_is_named_once(what):
    stream = as_stream(DataLoader(Augmented(), 3, sampler=Hidden(*HIDDEN[what])))
    with pytest.warns(RuntimeWarning, match=re.escape(f"Hidden changes its attribute '{what}")) as warned:
        [list(stream.open("train", pass_index, seed=0)) for pass_index in range(2)]
    assert len(warned) == 1


class Onward(Unsized):
    """Has no end; or has one, and yields more than it says."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return (at % 8 for at in (itertools.count() if self.samples is None else range(self.samples)))


class MoreThanItSays(Onward):
    def __len__(self):
        return 3


SAMPLES = {
    "more than 65,536 ": (Onward(None), {"batch_size": 64}),
    "more than 3 ": (MoreThanItSays(8), {"batch_size": None}),
}


@pytest.mark.parametrize("what", SAMPLES)
def test_a_sampler_that_yields_more_than_is_drawn_ahead_is_named_once(what):
    sampler, options = SAMPLES[what]
    stream = as_stream(DataLoader(range(8), sampler=sampler, **options))
    draw = lambda at: [*itertools.islice(stream.open("train", at, seed=0), 5)]  # noqa: E731
    with pytest.warns(RuntimeWarning, match=f"sampler {type(sampler).__name__} .*{what}") as warned:
        assert [len(draw(at)) for at in range(2)] == [5, 5]
    assert len(warned) == 1


def test_single_samples_are_counted_for_a_sampler_without_a_length(recwarn):
    """A pass of 65,536 samples is drawn ahead, whatever the batch size, and is all there."""
    stream = as_stream(DataLoader(range(8), 4096, sampler=Onward(1 << 16)))
    cursor = stream.open("train", 0, seed=0)
    next(cursor)
    assert len(cursor.position()["order"]["indices"]) == 1 << 16 and not recwarn.list


def test_a_live_sampler_is_drawn_batch_by_batch_where_it_is_declared_to_be_replayed():
    class Live(Sampler):
        asked = 0

        def __iter__(self):
            for at in range(6):
                self.asked += 1
                yield at

    for wrap, asked in ((replay, [2, 4, 6]), (lambda loader: loader, [6, 6, 6])):
        sampler = Live()
        cursor = as_stream(wrap(DataLoader(range(6), 2, sampler=sampler))).open("train", 0, seed=0)
        assert [next(cursor) is not None and sampler.asked for _ in range(3)] == asked


def test_a_stateful_sampler_of_no_length_is_refused_and_one_of_length_0_is_not():
    assert "a state_dict and no length" in as_stream(DataLoader(data, 3, sampler=Endless())).unsaveable
    assert as_stream(DataLoader(data, 3, sampler=Empty())).unsaveable is None


def test_a_sampler_of_which_a_part_is_lost_is_found_by_check():
    loader = DataLoader(Augmented(), 3, sampler=Hidden(*HIDDEN["hidden' (Bag)"]))
    found = check(loader).run
    assert found.kept is False and "pass 1: batch 0 from there differs" in found.why
    assert check(DataLoader(Augmented(), batch_sampler=InPlace())).run.kept


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_laws_of_a_stateful_dataset(batch_size):
    check_stream(lambda: as_stream(StatefulDataLoader(StatefulLines(), batch_size=batch_size)))


@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
def test_an_undisturbed_pass_is_the_bare_loop(loader):
    def run(batches_of):
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        data_loader = loader(Augmented(), batch_size=3, shuffle=True)
        taken = [list(batches_of(data_loader, p)) for p in range(2)]
        return fingerprint(taken), torch.rand(3).tolist()

    assert run(lambda it, p: it) == run(lambda it, p: as_stream(it).open("train", p, seed=0))


def test_the_state_before_the_end_resumes_into_no_batch_and_a_full_next_pass():
    """The trap of StatefulDataLoader: after the last batch, before StopIteration."""
    make = lambda: as_stream(StatefulDataLoader(StatefulLines(), batch_size=1))  # noqa: E731
    cursor = make().open("train", 0, seed=0)
    for _ in range(5):
        next(cursor)
    position = cursor.position()
    assert not position["ended"]
    stream = make()
    assert list(stream.open("train", 0, position, seed=0)) == []
    assert [int(batch) for batch in stream.open("train", 1, seed=0)] == [101, 102, 103, 104, 105]


def test_without_workers_no_sample_is_fetched_to_resume():
    cursor = as_stream(DataLoader(Augmented(), batch_size=2, shuffle=True)).open("train", 0, seed=0)
    next(cursor), next(cursor)
    dataset = Augmented()
    again = as_stream(DataLoader(dataset, batch_size=2, shuffle=True)).open(
        "train", 0, cursor.position(), seed=0
    )
    assert dataset.fetched == 0 and again.note is None
    assert again.remaining() == 2


def test_replay_with_workers_says_how_many():
    make = lambda: as_stream(DataLoader(Augmented(), batch_size=2, num_workers=1))  # noqa: E731
    cursor = make().open("train", 0, seed=0)
    next(cursor), next(cursor)
    position = cursor.position()
    cursor.close()
    again = make().open("train", 0, position, seed=0)
    again.close()
    assert again.note.startswith("data 'train' (DataLoader): replayed 2 batches in")


def test_a_loader_that_holds_another_number_of_generators_is_refused():
    cursor = as_stream(DataLoader(Augmented(), 2)).open("train", 0, seed=0)
    next(cursor)
    with pytest.raises(DataError, match=r"held 0 generators .* hold 1 now"):
        as_stream(DataLoader(Augmented(), 2, generator=generator())).open(
            "train", 0, cursor.position(), seed=0
        )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            {"persistent_workers": True},
            "has persistent_workers=True: .*; give it persistent_workers=False, or",
        ),
        ({"in_order": False}, "has in_order=False: .*; give it in_order=True, or use everstep.data.loader"),
    ],
)
def test_a_loader_whose_place_cannot_be_saved_is_refused_when_it_is_bound(option, message, tmp_path):
    loader = DataLoader(Augmented(), 2, num_workers=1, **option)
    with pytest.raises(NotResumableError, match=f"stream 'train': it {message}"):
        bind(loader, tmp_path / "run")
    cursor = as_stream(loader).open("train", 0, seed=0)  # as an evaluation reads it
    assert len(list(cursor)) == 4
    with pytest.raises(NotResumableError, match=message):
        cursor.position()
    if loader.persistent_workers:
        loader._iterator._shutdown_workers()


def test_a_sampler_with_a_state_and_without_a_length_is_refused():
    stream = as_stream(DataLoader(Augmented(), batch_sampler=BatchSampler(Endless(), 2, False)))
    with pytest.raises(NotResumableError, match=r"the sampler Endless, .* no length: give it __len__"):
        stream.open("train", 0, seed=0).position()


def test_a_sampler_of_torchdatas_is_advanced_to_its_place():
    check_stream(
        lambda: as_stream(DataLoader(Augmented(), 2, sampler=StatefulDistributedSampler(data, 2, 0)))
    )


def test_what_a_sampler_counts_is_no_part_of_what_the_data_is():
    sampler = DistributedSampler(data, 2, 0, seed=np.int64(3))
    stream = as_stream(DataLoader(data, 2, sampler=sampler))
    before = stream.describe(0)
    sampler.set_epoch(7)
    assert stream.describe(0) == before
    assert {fact: value for fact, value in before.items() if "." in fact} == {
        "sampler.drop_last": False,
        "sampler.num_samples": 4,
        "sampler.shuffle": True,
        "sampler.seed": 3,
        "sampler.num_replicas": 2,
        "sampler.rank": 0,
    }


def test_a_loader_with_a_state_of_its_own_is_read_as_any_iterable():
    class Mine(DataLoader):
        pass

    class Knowing(Mine):
        state_dict = load_state_dict = lambda self, *state: {}

    assert [as_stream(kind(Augmented())).resumes for kind in (Mine, Knowing)] == ["state", "replay"]


def test_a_loader_left_in_the_middle_carries_its_generator_on():
    def next_pass(stream):
        return fingerprint([batch[:, 0] for batch in stream.open("train", 1, seed=0)])

    def make():
        return as_stream(DataLoader(Augmented(), 2, shuffle=True, generator=generator()))

    stream = make()
    cursor = stream.open("train", 0, seed=0)
    next(cursor)
    cursor.close()
    position = cursor.position()
    fresh = make()
    fresh.open("train", 0, position, seed=0).close()
    assert next_pass(fresh) == next_pass(stream)
