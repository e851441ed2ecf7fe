"""Torch's DataLoader as the user wrote it, torchdata's, `loader` and `prefetch`; on several ranks, too."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import random
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import data as td
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import everstep
from everstep.backends.torch.user_dataloader import DataLoaderStream
from everstep.contracts.data import Share, Stream
from everstep.data import arrays, as_stream, loader, prefetch, replay
from everstep.data.adapt import describe
from everstep.data.prefetch import _differs
from everstep.errors import ConfigError, DataError, DivergenceError, NotResumableError
from everstep.state import Slot
from everstep.testing import check
from everstep.testing.checks import check_stream, fingerprint
from tiny_runs import bind
from waiting import PATIENCE, until

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


class Transformed(Augmented):
    """Each of its transforms has a generator of its own, as MONAI's have."""

    def __init__(self):
        super().__init__()
        self.transform = SimpleNamespace(
            transforms=[SimpleNamespace(R=np.random.RandomState(at)) for at in (1, 2)]
        )

    def __getitem__(self, index):
        return sum(each.R.rand() for each in self.transform.transforms) + super().__getitem__(index)


class Lines(IterableDataset):
    """An iterable-style dataset, split among the workers."""

    def __iter__(self):
        info = td.get_worker_info()
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


def place_after(batches: int, stream: Any, pass_index: int = 0) -> Any:
    """The position of a pass of which these batches were drawn."""
    with closing(stream.open("train", pass_index, seed=0)) as cursor:
        [next(cursor) for _ in range(batches)]
        return cursor.position()


def generator(seed=5):
    return torch.Generator().manual_seed(seed)


class Drawn:
    """A sampler that draws each pass by a function of itself, with the attributes that it is given."""

    def __init__(self, draw, **kept):
        self.draw = draw
        vars(self).update(kept)

    def __iter__(self):
        return iter(self.draw(self))


class Sized(Drawn):
    length = 8

    def __len__(self):
        return self.length


class Stateful(Drawn):
    """Its order follows from its own count of passes, and its state is that count."""

    def __init__(self):
        super().__init__(by_count, passes=0)

    def state_dict(self):
        return {"passes": self.passes}

    def load_state_dict(self, state):
        self.passes = state["passes"]


class Counting(Stateful, Sized):
    pass


def by_count(it):
    it.passes += 1
    return torch.randperm(8, generator=generator(it.passes))


def lazily(it):
    """Chunk by chunk, from the global generators, as it goes."""
    for chunk in (0, 4):
        yield from torch.randperm(4) + chunk


def in_place():
    """A sampler that shuffles the batches of its own list in place, as deepspeech.pytorch's does."""

    def draw(it):
        for batch in it.bins:
            np.random.shuffle(batch)
            yield batch
        it.passes += 1

    return Sized(draw, length=3, bins=[[0, 1, 2], [3, 4, 5], [6, 7]], passes=0)


def later(it):
    """Its own list, but for the first pass."""
    if it.passes:
        random.shuffle(it.order)
    it.passes += 1
    return [*it.order]


data = Augmented()
MAKERS = {
    "in order": lambda loader: loader(data, batch_size=3),
    "shuffled": lambda loader: loader(data, batch_size=3, shuffle=True),
    "own generator": lambda loader: loader(data, batch_size=3, shuffle=True, generator=generator()),
    "generators of transforms": lambda loader: loader(Transformed(), batch_size=3, shuffle=True),
    "drop last": lambda loader: loader(data, batch_size=3, shuffle=True, drop_last=True),
    "no batches": lambda loader: loader(data, batch_size=None),
    "replacement": lambda loader: loader(data, 20, sampler=td.RandomSampler(data, True, 70, generator())),
    "subset": lambda loader: loader(data, batch_size=2, sampler=td.SubsetRandomSampler([1, 3, 5, 6, 7])),
    "batches of indices": lambda loader: loader(data, batch_sampler=[np.array([5, 2]), np.array([0, 7])]),
    "weighted": lambda loader: loader(data, batch_size=3, sampler=td.WeightedRandomSampler([1.0] * 8, 8)),
    "iterable": lambda loader: loader(Lines(), batch_size=2),
    "lazily": lambda loader: loader(data, batch_size=3, sampler=Sized(lazily)),
    "its own list in place": lambda loader: loader(data, batch_sampler=in_place()),
    "its own list later": lambda loader: loader(data, 3, sampler=Sized(later, order=[*range(8)], passes=0)),
    "a state of its own": lambda loader: loader(data, batch_size=3, sampler=Counting()),
    "no length": lambda loader: loader(data, 3, sampler=Drawn(lambda it: torch.randperm(8).tolist())),
    "no length, and a count": lambda loader: loader(data, batch_size=3, sampler=Drawn(by_count, passes=0)),
    "an array": lambda loader: loader(data, batch_size=3, sampler=np.arange(8)[::-1].copy()),
    "keys": lambda loader: loader(data, batch_size=3, sampler=dict.fromkeys(range(8)).keys()),
    "single samples": lambda loader: loader(data, batch_size=None, sampler=Counting()),
    "torchdata's sampler": lambda loader: loader(data, 2, sampler=StatefulDistributedSampler(data, 2, 0)),
}


@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_laws(make, loader):
    check_stream(lambda: as_stream(make(loader)))


ONE_AHEAD = {"batch_size": 1, "num_workers": 1, "prefetch_factor": 1}
WORKERS = {
    "map": lambda loader, own: loader(Augmented(4), 2, shuffle=True, num_workers=2, generator=own),
    "iterable": lambda loader, own: loader(Lines(), 2, num_workers=2),
    "lazily": lambda loader, own: loader(Augmented(), sampler=Sized(lazily), **ONE_AHEAD, generator=own),
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


class Hidden(Sized):
    """Draws a pass by a function of what it keeps, which no checkpoint can hold."""

    passes = 0


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
    hidden, draw = HIDDEN[what]
    stream = as_stream(DataLoader(Augmented(), 3, sampler=Hidden(draw, hidden=hidden)))
    with pytest.warns(RuntimeWarning, match=re.escape(f"Hidden changes its attribute '{what}")) as warned:
        [list(stream.open("train", pass_index, seed=0)) for pass_index in range(2)]
    assert len(warned) == 1


ENDLESS = Drawn(lambda it: (at % 8 for at in itertools.count()))
MORE_THAN_IT_SAYS = Sized(lambda it: range(8), length=3)


@pytest.mark.parametrize(
    ("sampler", "batch_size", "what"), [(ENDLESS, 64, "65,536"), (MORE_THAN_IT_SAYS, None, "3")]
)
def test_a_sampler_that_yields_more_than_is_drawn_ahead_is_named_once(sampler, batch_size, what):
    stream = as_stream(DataLoader(range(8), batch_size, sampler=sampler))
    draw = lambda at: [*itertools.islice(stream.open("train", at, seed=0), 5)]  # noqa: E731
    said = f"sampler {type(sampler).__name__} .*more than {what} "
    with pytest.warns(RuntimeWarning, match=said) as warned:
        assert [len(draw(at)) for at in range(2)] == [5, 5]
    assert len(warned) == 1


def test_single_samples_are_counted_for_a_sampler_without_a_length(recwarn):
    """A pass of 65,536 samples is drawn ahead, whatever the batch size, and is all there."""
    sampler = Drawn(lambda it: (at % 8 for at in range(1 << 16)))
    stream = as_stream(DataLoader(range(8), 4096, sampler=sampler))
    cursor = stream.open("train", 0, seed=0)
    next(cursor)
    assert len(cursor.position()["order"]["indices"]) == 1 << 16 and not recwarn.list


def test_a_live_sampler_is_drawn_batch_by_batch_where_it_is_declared_to_be_replayed():
    def live(it):
        for at in range(6):
            it.asked += 1
            yield at

    for wrap, asked in ((replay, [2, 4, 6]), (lambda loader: loader, [6, 6, 6])):
        sampler = Drawn(live, asked=0)
        cursor = as_stream(wrap(DataLoader(range(6), 2, sampler=sampler))).open("train", 0, seed=0)
        assert [next(cursor) is not None and sampler.asked for _ in range(3)] == asked


def test_a_stateful_sampler_of_no_length_is_refused_and_one_of_length_0_is_not():
    for options in ({"sampler": Stateful()}, {"batch_sampler": BatchSampler(Stateful(), 2, False)}):
        unsaveable = as_stream(DataLoader(data, **options)).unsaveable
        assert re.search(r"sampler Stateful, .* no length: give it __len__, or .*replay", unsaveable)
    replayed = replay(DataLoader(range(6), 2, sampler=Stateful()))
    assert as_stream(replayed).unsaveable is None
    empty = Counting()
    empty.draw, empty.length = lambda it: (), 0
    assert as_stream(DataLoader(data, 3, sampler=empty)).unsaveable is None


def test_a_sampler_of_which_a_part_is_lost_is_found_by_check():
    hidden, draw = HIDDEN["hidden' (Bag)"]
    loader = DataLoader(Augmented(), 3, sampler=Hidden(draw, hidden=hidden))
    found = check(loader).run
    assert found.kept is False and "pass 1: batch 0 from there differs" in found.why
    assert check(DataLoader(Augmented(), batch_sampler=in_place())).run.kept


@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
def test_an_undisturbed_pass_is_the_bare_loop(loader):
    def run(batches_of):
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        data_loader = loader(Augmented(), batch_size=3, shuffle=True)
        return fingerprint([list(batches_of(data_loader, p)) for p in range(2)]), torch.rand(3).tolist()

    assert run(lambda it, p: it) == run(lambda it, p: as_stream(it).open("train", p, seed=0))


def test_without_workers_no_sample_is_fetched_to_resume_and_with_them_it_is_said_how_many():
    position = place_after(2, as_stream(DataLoader(Augmented(), batch_size=2, shuffle=True)))
    dataset = Augmented()
    again = as_stream(DataLoader(dataset, batch_size=2, shuffle=True)).open("train", 0, position, seed=0)
    assert dataset.fetched == 0 and again.note is None
    assert again.remaining() == 2
    make = lambda: as_stream(DataLoader(Augmented(), batch_size=2, num_workers=1))  # noqa: E731
    with closing(make().open("train", 0, place_after(2, make()), seed=0)) as again:
        assert again.note.startswith("data 'train' (DataLoader): replayed 2 batches in")


@pytest.mark.parametrize(("option", "message"), [
    ("persistent_workers", "has persistent_workers=True: .*; give it persistent_workers=False, or"),
    ("in_order", "has in_order=False: .*; give it in_order=True, or use everstep.data.loader"),
])  # fmt: skip
def test_a_loader_whose_place_cannot_be_saved_is_refused_when_it_is_bound(option, message, tmp_path):
    loader = DataLoader(Augmented(), 2, num_workers=1, **{option: option == "persistent_workers"})
    with pytest.raises(NotResumableError, match=f"stream 'train': it {message}"):
        bind(loader, tmp_path / "run")
    cursor = as_stream(loader).open("train", 0, seed=0)  # as an evaluation reads it
    assert len(list(cursor)) == 4
    if loader.persistent_workers:
        loader._iterator._shutdown_workers()


def test_what_a_sampler_counts_is_no_part_of_what_the_data_is():
    sampler = DistributedSampler(data, 2, 0, seed=np.int64(3))
    stream = as_stream(DataLoader(data, 2, sampler=sampler))
    before = stream.describe(0)
    sampler.set_epoch(7)
    assert stream.describe(0) == before
    facts = {"drop_last": False, "num_samples": 4, "shuffle": True, "seed": 3, "num_replicas": 2, "rank": 0}
    said = {fact: value for fact, value in before.items() if "." in fact}
    assert said == {f"sampler.{fact}": value for fact, value in facts.items()}


def test_a_loader_with_a_state_of_its_own_is_read_as_any_iterable():
    class Mine(DataLoader):
        pass

    class Knowing(Mine):
        state_dict = load_state_dict = lambda self, *state: {}

    assert [as_stream(kind(Augmented())).resumes for kind in (Mine, Knowing)] == ["state", "replay"]


def rank_loader(length: int, rank: int, size: int, batch: int, kind: Any = DataLoader, **options: Any) -> Any:
    """A user's loader on one rank; `batch` is the batch size of the rank."""
    drop_last, sampler = options.pop("drop_last", False), options.pop("sampler", DistributedSampler)
    own = sampler(range(length), num_replicas=size, rank=rank, **options.pop("given", {}))
    return kind(range(length), batch_size=batch, sampler=own, drop_last=drop_last, **options)


def parts(length: int, size: int, batch: int, uneven: Any, position: Any = None, **options: Any) -> list[Any]:
    """By batch, the parts of all ranks with their weights, of the second pass."""
    found = []
    for rank in range(size):
        stream = as_stream(rank_loader(length, rank, size, batch, **options)).split(Share(rank, size, uneven))
        with closing(stream.open("train", 1, position, seed=0)) as cursor:
            left = cursor.remaining()
            found.append([(batch.tolist(), cursor.weight) for batch in cursor])
        assert left == len(found[-1])
    return list(zip(*found, strict=True))


def whole(length: int, batch: int, at: int = 1, **options: Any) -> list[list[int]]:
    """The batches of one process in pass `at`."""
    given = rank_loader(length, 0, 1, batch, **options)
    given.sampler.set_epoch(at)
    return [batch.tolist() for batch in given]


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_parts_are_the_batches_of_one_process(length, size, batch, shuffle, drop_last) -> None:
    options: Any = {"given": {"shuffle": shuffle}, "drop_last": drop_last}
    together = parts(length, size, batch, "pad", **options)
    expected = whole(length, batch * size, **options)
    assert len(together) == len(expected)
    for all_ranks, one in zip(together, expected, strict=True):
        for rank, (part, weight) in enumerate(all_ranks):
            assert part == one[rank::size] or (weight == 0.0 and len(part) == 1 and not one[rank::size])
        means = [weight * sum(part) / len(part) for part, weight in all_ranks]
        assert sum(means) / size == pytest.approx(sum(one) / len(one))


@given(st.integers(1, 30), st.integers(2, 4), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_the_rule_for_a_last_batch_that_does_not_divide(length: int, size: int, batch: int) -> None:
    rest = length % (batch * size)
    if rest % size:
        with pytest.raises(DataError, match=rf"DataLoader: a batch of {rest} samples does not divide among"):
            parts(length, size, batch, None)
    else:
        assert {weight for ranks in parts(length, size, batch, None) for _, weight in ranks} <= {1.0}
    if 0 < rest < size:
        with pytest.raises(DataError, match=rf"has none for some of {size} ranks"):
            parts(length, size, batch, "weight")
    else:
        assert parts(length, size, batch, "weight") == parts(length, size, batch, "pad")
    if length >= size:
        dropped = parts(length, size, batch, "drop")
        # What torch's own sampler does with drop_last=True.
        assert dropped == parts(length, size, batch, None, given={"drop_last": True})
        assert sum(len(part) for ranks in dropped for part, _ in ranks) == length - length % size


KINDS: dict[str, Any] = {
    "plain": {}, "workers": {"num_workers": 2}, "stateful": {"kind": StatefulDataLoader},
    "stateful sampler": {"kind": StatefulDataLoader, "sampler": StatefulDistributedSampler},
}  # fmt: skip


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_each_pass_has_its_order_and_a_place_opens_with_another_number_of_ranks(options: Any) -> None:
    stream = as_stream(rank_loader(23, 0, 2, 3, **options)).split(Share(0, 2, "pad"))
    position = place_after(2, stream, pass_index=1)
    assert whole(23, 6, at=0) != whole(23, 6, at=1) != whole(23, 6, at=2)
    for size, batch in ((2, 3), (3, 2)):
        together = parts(23, size, batch, "pad", position, **options)
        read = [sorted(each for part, weight in ranks if weight for each in part) for ranks in together]
        assert read == [sorted(batch) for batch in whole(23, 6)[2:]]


def test_evaluating_on_the_loader_in_training_changes_no_order() -> None:
    given = rank_loader(12, 0, 2, 2)
    training, evaluation = (as_stream(given).split(Share(0, 2)) for _ in range(2))
    opened = training.open("train", 2, seed=0)
    list(evaluation.open("valid", 0, seed=0))
    assert [batch.tolist() for batch in opened] == [batch[::2] for batch in whole(12, 4, at=2)]


def test_the_description_is_that_of_one_process() -> None:
    def described(rank: int, size: int, batch: int, made_with: int | None = None) -> Any:
        given = rank_loader(23, rank, size, made_with or batch)
        given.batch_sampler.batch_size = batch
        return describe(as_stream(given).split(Share(rank, size, "weight")), 0)

    one = describe(as_stream(rank_loader(23, 0, 1, 12)), 0)
    assert one == described(0, 1, 12) == described(0, 2, 6) == described(1, 2, 6) == described(2, 4, 3)
    assert one == described(0, 1, 12, made_with=4) == described(1, 2, 6, made_with=4)
    assert one != described(0, 2, 12)


class RanksOwn(Sampler[int]):
    """A user's sampler that says its rank."""

    num_replicas, rank = 2, 1

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter([5, 3, 1, 0])

    def __len__(self) -> int:
        return 4


def test_a_sampler_of_ones_own_that_says_its_rank_is_taken_at_its_word() -> None:
    sampler = RanksOwn()
    stream = as_stream(DataLoader(range(8), batch_size=2, sampler=sampler)).split(Share(1, 2))
    cursor = stream.open("train", 4, seed=0)
    assert [(batch.tolist(), cursor.weight) for batch in cursor] == [([5, 3], 1.0), ([1, 0], 1.0)]
    assert sampler.epochs == [4]


def plain(**options: Any) -> Stream:
    return as_stream(DataLoader(range(8), **options))


def on_rank_1(stream: Stream) -> Callable[[], object]:
    return lambda: stream.split(Share(1, 2))


def with_a_generator_less() -> object:
    position = place_after(1, plain(batch_size=2))
    return plain(batch_size=2, generator=generator()).open("train", 0, position, seed=0)


IN_BATCHES = BatchSampler(td.RandomSampler(range(8)), 2, False)
OTHER_BATCHES: list[tuple[Callable[[], object], str]] = [
    (
        on_rank_1(plain(batch_size=2)),
        r"SequentialSampler .* add sampler=torch.utils.data.DistributedSampler\(",
    ),
    (
        on_rank_1(plain(batch_size=2, shuffle=True)),
        "RandomSampler .* in place of shuffle=True, with the batch",
    ),
    (
        on_rank_1(plain(batch_sampler=IN_BATCHES)),
        r"BatchSampler would hand.*use sampler=DistributedSampler\(",
    ),
    (on_rank_1(as_stream(DataLoader(Lines()))), "does not say that it splits itself"),
    (
        on_rank_1(as_stream(rank_loader(8, 0, 4, 2))),
        "rank 0 of 4, and this is rank 1 of 2; make it with num_r",
    ),
    (with_a_generator_less, "held 0 generators .* hold 1 now"),
]


@pytest.mark.parametrize(("call", "words"), OTHER_BATCHES, ids=[words[:20] for _, words in OTHER_BATCHES])
def test_what_would_read_other_batches_is_refused_by_name(call: Callable[[], object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        call()


def noisy_collate(samples):
    return torch.stack(samples), random.random(), np.random.rand(), torch.rand(2)


def batches(stream, purpose="train", pass_index=0, position=None, seed=0):
    with closing(stream.open(purpose, pass_index, position, seed=seed)) as cursor:
        return fingerprint(list(cursor))


def make(**options):
    return loader(Augmented(11), 3, shuffle=True, collate_fn=noisy_collate, **options)


def part(**options: Any) -> Stream:
    return as_stream(rank_loader(11, 2, 3, 2, **options)).split(Share(2, 3, "pad"))


OTHERS: dict[str, tuple[Any, bool]] = {
    **{
        f"lines by {n}": (lambda n=n: as_stream(StatefulDataLoader(StatefulLines(), n)), True)
        for n in (1, 2, 5)
    },
    "a part": (part, False),
    "a part of a stateful sampler": (lambda: part(**KINDS["stateful sampler"]), False),
    "loader, and a collate": (make, False),
    "loader": (lambda: loader(Augmented(11), 3, shuffle=True), True),
    "prefetch": (lambda: prefetch(arrays(np.arange(11), batch_size=3, shuffle=True), buffer=2), True),
    "prefetch, all at once": (lambda: prefetch(replay(range(4)), buffer=9), True),
}
"""Streams, and whether they can be divided among ranks."""


@pytest.mark.parametrize(("make", "shares"), OTHERS.values(), ids=OTHERS)
def test_laws_of_other_streams(make, shares):
    check_stream(make, shares=shares)


def test_augmentation_differs_between_passes_samples_and_seeds():
    def noise(**where):
        return np.concatenate([b[0] for b in make().open(**where)])[:, 1:]

    first = noise(purpose="train", pass_index=0, seed=0)
    assert len(np.unique(first)) == first.size
    for other in ({"pass_index": 1}, {"seed": 1}, {"purpose": "valid"}):
        again = noise(**{"purpose": "train", "pass_index": 0, "seed": 0, **other})
        assert not np.isin(again, first).any()


def mark_dataset(worker_id):
    td.get_worker_info().dataset.mark = worker_id + 10


class Marked(Augmented):
    mark = 0

    def __getitem__(self, index):
        return self.mark


def test_worker_init_fn_runs_and_sees_the_users_dataset():
    [batch, *_] = loader(Marked(11), 3, num_workers=1, worker_init_fn=mark_dataset).open("t", 0, seed=0)
    assert batch.tolist() == [10, 10, 10]


@pytest.mark.campaign("long")
def test_workers_started_anew_give_the_same():
    assert batches(make(num_workers=1, multiprocessing_context="spawn")) == batches(make())


class Drawing(Augmented):
    def __getitem__(self, index):
        torch.rand(3)
        return super().__getitem__(index)


def test_collate_has_random_state_of_its_own():
    samples = (Augmented(11), Drawing(11))
    one, other = (loader(d, 3, collate_fn=noisy_collate).open("t", 0, seed=0) for d in samples)
    for left, right in zip(one, other, strict=True):
        assert fingerprint(left[1:]) == fingerprint(right[1:])


def test_on_several_ranks_samples_have_the_noise_of_one_process_and_collate_draws_for_each() -> None:
    def drawn(share: Share) -> list[tuple[Any, float]]:
        with closing(make().split(share).open("train", 1, {"batches": 1}, seed=3)) as cursor:
            return [(batch, cursor.weight) for batch in cursor]

    ranks = [drawn(Share(rank, 3, "pad")) for rank in range(3)]
    for (batch, _), *parts in zip(drawn(Share()), *ranks, strict=True):
        assert torch.equal(torch.cat([part[0] for part, weight in parts if weight]), batch[0])
        assert len({str(each[3]) for each in (batch, *(part for part, _ in parts))}) == 4
    assert fingerprint(ranks[0]) == fingerprint(drawn(Share(0, 3, "pad")))


class Broken(Augmented):
    def __getitem__(self, index):
        if index == 4:
            raise KeyError("sample 4 is missing")
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_the_datasets_error_arrives_at_its_batch(workers):
    cursor = loader(Broken(11), 3, num_workers=workers).open("train", 0, seed=0)
    assert next(cursor).tolist() == [0, 1, 2]
    with pytest.raises(KeyError, match="sample 4 is missing"):
        next(cursor)
    assert cursor.position()["batches"] == 1


ALONE = {
    "arrays": lambda **options: arrays(np.arange(22.0).reshape(11, 2), batch_size=4, **options),
    "loader": lambda **options: loader(Augmented(11), 4, **options),
    "workers": lambda **options: loader(Augmented(11), 4, num_workers=2, **options),
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


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(1)])
def test_data_that_draws_from_the_global_random_state_is_not_prefetched(draw):
    left = []

    class Noisy:
        def __iter__(self):
            try:
                yield draw()
            finally:
                left.append(self)

    with pytest.raises(ConfigError, match=r"data 'train' draws from the global random state.* leave"):
        prefetch(Noisy()).open("train", 0, seed=0)
    assert len(left) == 1, "the data is not closed"
    own = np.random.default_rng(0)
    assert len(list(prefetch(as_stream(own.random() for _ in range(3))).open("train", 0, seed=0))) == 3
    assert not _threads()


def test_random_state_that_was_not_in_use_before_is_not_the_data_s():
    before = {"python": 1, "torch": {"cpu": [2], "device": 0}}
    assert not _differs(before, {"python": 1, "torch": {"cpu": [2], "cuda": [3], "device": 1}, "jax": 4})
    assert _differs(before, {"python": 1, "torch": {"cpu": [3], "device": 0}})


def test_ctrl_c_in_the_first_batch_is_not_kept_for_later():
    def interrupted():
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        prefetch(interrupted()).open("train", 0, seed=0)


def _threads():
    return [thread for thread in threading.enumerate() if "everstep prefetch" in thread.name]


def test_no_thread_is_left():
    cursor = prefetch(as_stream(range(100)), buffer=1).open("train", 0, seed=0)
    next(cursor)
    assert len(_threads()) == 1
    cursor.close()
    assert not _threads()
    cursor = prefetch(as_stream(range(100)), buffer=1).open("train", 0, seed=0)
    thread = _threads()[0]
    del cursor
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()


STREAMS = {
    "keyed": lambda data: loader(data, 1, num_workers=2),
    "plain": lambda data: DataLoaderStream(DataLoader(data, num_workers=2)),
}


class Pids(Dataset):
    """Samples that say in which process they were made, which dies at sample 8 as soon as a file is there."""

    def __init__(self, die_at=None):
        self.die_at = die_at

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == 8 and self.die_at is not None:
            until(self.die_at.exists)
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()


def open_pass(kind, data=None):
    return STREAMS[kind](data or Pids()).open("train", 0, seed=0)


def wait_until_gone(pid):
    """Until the process has ended, reaped or not."""

    def is_gone():
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True

    until(is_gone)


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("kind", STREAMS)
def test_a_killed_worker_is_an_error_of_the_next_fetch(kind, locked):
    """Also where it holds the lock of torch's event, which it takes to see whether it is to end."""
    cursor = open_pass(kind)
    assert cursor.fetch_error_may_be_signal
    pid = int(next(cursor))
    if locked:  # in the worker's place; a test from inside, a kill seldom meets it
        cursor._batches._batches._workers_done_event._cond.acquire()
    os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):  # the handler of its signal may come first, and ask for its status
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert sum(range(1000)) == 499500  # the user's step: undisturbed
    said = rf"'train'.* worker died: pid {pid} was killed by signal 9 \(SIGKILL\)"
    with pytest.raises(DataError, match=said):
        next(cursor)
    assert cursor.position()["batches"] == 1
    cursor.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("kind", STREAMS)
def test_a_worker_killed_while_the_main_thread_waits_for_it(kind, tmp_path):
    cursor = open_pass(kind, Pids(tmp_path / "now"))
    pids = [int(next(cursor)) for _ in range(8)]
    (tmp_path / "now").touch()
    with pytest.raises(DataError, match=f"pid {pids[0]} was killed by signal 9"):
        next(cursor)


@pytest.mark.campaign("long", gate=4)
@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_signals_to_the_group_pass_workers_by(kind, number):
    cursor = open_pass(kind)
    pids = {worker.pid for worker in multiprocessing.active_children()}
    for pid in pids:
        os.kill(pid, number)  # a worker may not have come to its first line yet
    assert {int(next(cursor)), int(next(cursor))} == pids
    for pid in pids:
        os.kill(pid, number)
    assert {int(batch) for batch in cursor} == pids and not multiprocessing.active_children()


@pytest.mark.parametrize("kind", STREAMS)
def test_handlers_and_processes_are_gone_after_close(kind):
    list(open_pass(kind))  # torch sets its own SIGCHLD handler once, for good
    before, mask = [*map(signal.getsignal, range(1, 32))], signal.pthread_sigmask(signal.SIG_BLOCK, ())
    outer, inner = open_pass(kind), open_pass(kind)
    next(outer), next(inner)
    outer.close()
    next(inner)
    inner.close()
    assert [*map(signal.getsignal, range(1, 32))] == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask and not multiprocessing.active_children()


def test_the_users_init_function_is_put_back():
    def init(worker_id):
        torch.set_num_threads(1)

    mine = DataLoader(Pids(), num_workers=1, worker_init_fn=init)
    DataLoaderStream(mine).open("train", 0, seed=0).close()
    assert mine.worker_init_fn is init


class Hanging(Pids):
    """The worker hangs in its fifth sample."""

    def __getitem__(self, index):
        while index > 3:
            signal.pause()
        return os.getpid()


def open_and_leave(pipe, stays):
    """Program of a process that has a worker."""
    cursor = loader(Hanging(), 1, num_workers=1).open("train", 0, seed=0)
    pipe.send(int(next(cursor)))
    if stays:
        pipe.recv()


@pytest.mark.parametrize("killed", [True, False])
def test_no_worker_outlives_its_parent(killed):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=open_and_leave, args=(theirs, killed))
    child.start()
    worker = ours.recv()
    if killed:
        child.kill()
    child.join(PATIENCE)
    assert child.exitcode == (-signal.SIGKILL if killed else 0)
    wait_until_gone(worker)


def cycle(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


class Reader:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def batches(self) -> Iterator[Any]:
        while True:
            yield from self.loader


def two_that_name_each_other() -> Iterator[int]:
    both = SimpleNamespace()

    def first() -> Iterator[int]:
        while True:
            yield next(both.second)

    def second() -> Iterator[int]:
        while True:
            yield 1 if both.first else 2

    both.first, both.second = first(), second()
    return both.first


def test_a_generator_around_a_shuffling_loader_is_warned_of_at_the_start(tmp_path: Path) -> None:
    """Its second round is shuffled by what the training has drawn by then."""

    def start(max_step: int, make: Any, run: str) -> everstep.Supervisor:
        torch.manual_seed(0)
        sv = everstep.Supervisor(tmp_path / run, {"w": Slot(0.0)}, max_step=max_step, seed=1)
        with sv:
            batches = sv.stream(make())
            while not sv.should_stop():
                torch.rand(())  # as dropout draws
                next(batches)
                sv.advance(loss=1.0)
        return sv

    def warned(sv: everstep.Supervisor) -> list[str]:
        return [text for text in sv.ending.warnings if "give the DataLoader itself" in text]

    data = torch.arange(8)
    shuffled = partial(DataLoader, data, 2, shuffle=True)
    in_batches = BatchSampler(td.RandomSampler(data), 2, False)
    bad = {
        "cycle": lambda: cycle(shuffled()),
        "nested": lambda: cycle(cycle(shuffled())),
        "method": lambda: Reader(shuffled()).batches(),
        "batches": lambda: cycle(DataLoader(data, batch_sampler=in_batches)),
    }
    for name, make in bad.items():
        (text,) = warned(start(2, make, name))
        assert "stream 'train' is a generator, '" in text
    good = {
        "in order": lambda: cycle(DataLoader(data, 2)),
        "own": lambda: cycle(DataLoader(data, 2, shuffle=True, generator=generator())),
        "itself": shuffled, "no loader": lambda: cycle([1, 2]), "each other": two_that_name_each_other,
    }  # fmt: skip
    for name, make in good.items():
        assert not warned(start(6, make, name)) and start(9, make, name).ending.step == 9
    assert start(3, bad["cycle"], "cycle").ending.warnings == ()  # once in a run; the first round is exact
    start(6, bad["cycle"], "cycle")
    with pytest.raises(DivergenceError, match=r"generator 'cycle' gives other .* the DataLoader itself"):
        start(9, bad["cycle"], "cycle")
    verdict = check(cycle(shuffled()))
    assert "until it draws at random again, as a DataLoader does at a second pass" in str(verdict)
