"""A user's DataLoader on several ranks: its DistributedSampler is understood, its padding never counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from everstep.contracts.data import Share, Stream, Uneven
from everstep.data import as_stream
from everstep.data.adapt import describe
from everstep.errors import DataError
from everstep.testing import check_stream

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's


class Numbers(torch.utils.data.Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def loader(length: int, rank: int, size: int, batch_size: int, kind: Any = DataLoader, **options: Any) -> Any:
    """A user's loader on one rank; `batch_size` is that of the rank."""
    drop_last, sampler = options.pop("drop_last", False), options.pop("sampler", DistributedSampler)
    own = sampler(Numbers(length), num_replicas=size, rank=rank, **options.pop("given", {}))
    return kind(Numbers(length), batch_size=batch_size, sampler=own, drop_last=drop_last, **options)


def parts(
    length: int,
    size: int,
    batch: int,
    uneven: Uneven | None,
    position: Any = None,
    at: int = 1,
    **options: Any,
) -> list[tuple[tuple[list[int], float], ...]]:
    """By batch, the parts of all ranks with their weights, of pass `at`."""
    found = []
    for rank in range(size):
        stream = as_stream(loader(length, rank, size, batch, **options)).split(Share(rank, size, uneven))
        cursor = stream.open("train", at, position, seed=0)
        left = cursor.remaining()
        found.append([(batch.tolist(), cursor.weight) for batch in cursor])
        assert left == len(found[-1])
        cursor.close()
    return list(zip(*found, strict=True))


def whole(length: int, batch: int, at: int = 1, **options: Any) -> list[list[int]]:
    """The batches of one process in pass `at`."""
    given = loader(length, 0, 1, batch, **options)
    given.sampler.set_epoch(at)
    return [batch.tolist() for batch in given]


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_parts_are_the_batches_of_one_process(
    length: int, size: int, batch: int, shuffle: bool, drop_last: bool
) -> None:
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


def union(ranks: tuple[tuple[list[int], float], ...]) -> list[int]:
    """The samples of a batch on all ranks, without padding."""
    return sorted(sample for part, weight in ranks if weight for sample in part)


KINDS: dict[str, Any] = {
    "plain": {},
    "workers": {"num_workers": 2},
    "stateful": {"kind": StatefulDataLoader},
    "stateful sampler": {"kind": StatefulDataLoader, "sampler": StatefulDistributedSampler},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_each_pass_has_its_order_and_a_place_opens_with_another_number_of_ranks(options: Any) -> None:
    stream = as_stream(loader(23, 0, 2, 3, **options)).split(Share(0, 2, "pad"))
    cursor = stream.open("train", 1, seed=0)
    next(cursor), next(cursor)
    position = cursor.position()
    cursor.close()
    assert whole(23, 6, at=0) != whole(23, 6, at=1) != whole(23, 6, at=2)
    for size, batch in ((2, 3), (3, 2)):
        together = parts(23, size, batch, "pad", position, **options)
        assert [union(ranks) for ranks in together] == [sorted(batch) for batch in whole(23, 6)[2:]]


@pytest.mark.parametrize("options", [KINDS["plain"], KINDS["stateful sampler"]])
def test_a_part_keeps_the_laws_of_streams(options: Any) -> None:
    check_stream(lambda: as_stream(loader(11, 2, 3, 2, **options)).split(Share(2, 3, "pad")), shares=False)


class Stateful(Numbers):
    """A dataset whose samples depend on how many it has given, which its state tells."""

    given = 0

    def __getitem__(self, index: int) -> int:
        self.given += 1
        return 100 * self.given + index

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


def test_the_laws_hold_for_a_part_with_a_state() -> None:
    def part() -> Stream:
        sampler = DistributedSampler(Stateful(12), num_replicas=2, rank=1)
        return as_stream(StatefulDataLoader(Stateful(12), batch_size=1, sampler=sampler)).split(Share(1, 2))

    check_stream(part, shares=False)


def test_evaluating_on_the_loader_in_training_changes_no_order() -> None:
    given = loader(12, 0, 2, 2)
    training, evaluation = (as_stream(given).split(Share(0, 2)) for _ in range(2))
    opened = training.open("train", 2, seed=0)
    list(evaluation.open("valid", 0, seed=0))
    assert [batch.tolist() for batch in opened] == [batch[::2] for batch in whole(12, 4, at=2)]


def test_the_description_is_that_of_one_process() -> None:
    def described(rank: int, size: int, batch: int) -> Any:
        given = loader(23, rank, size, batch)
        return describe(as_stream(given).split(Share(rank, size, "weight")), 0)

    one = describe(as_stream(loader(23, 0, 1, 12)), 0)
    assert one == described(0, 1, 12) == described(0, 2, 6) == described(1, 2, 6) == described(2, 4, 3)
    assert one != described(0, 2, 12)


class Halves(IterableDataset[int]):
    """Samples of one rank, which say so."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.num_replicas = rank, size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 8, self.num_replicas))


def test_an_iterable_dataset_that_says_that_it_splits_itself() -> None:
    stream = as_stream(DataLoader(Halves(1, 2), batch_size=2)).split(Share(1, 2))
    assert [batch.tolist() for batch in stream.open("train", 0, seed=0)] == [[1, 3], [5, 7]]
    assert describe(stream, 0)["inside"] == {"num_workers": 0, "ranks": 2}
    with pytest.raises(DataError, match="part of rank 1 of 2, and this is rank 0 of 2; make it with"):
        as_stream(DataLoader(Halves(1, 2))).split(Share(0, 2))


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
    stream = as_stream(DataLoader(Numbers(8), batch_size=2, sampler=sampler)).split(Share(1, 2))
    cursor = stream.open("train", 4, seed=0)
    assert [(batch.tolist(), cursor.weight) for batch in cursor] == [([5, 3], 1.0), ([1, 0], 1.0)]
    assert sampler.epochs == [4]


class Lines(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def plain(**options: Any) -> Stream:
    return as_stream(DataLoader(Numbers(8), **options))


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (
            plain(batch_size=2),
            r"sampler SequentialSampler .* add sampler=torch.utils.data.DistributedSampler\(",
        ),
        (
            plain(batch_size=2, shuffle=True),
            r"RandomSampler .* in place of shuffle=True, with the batch_size of",
        ),
        (
            plain(batch_sampler=BatchSampler(RandomSampler(range(8)), 2, False)),
            r"the batch_sampler BatchSampler would hand each.*use sampler=DistributedSampler\(",
        ),
        (as_stream(DataLoader(Lines())), "does not say that it splits itself"),
        (
            as_stream(loader(8, 0, 4, 2)),
            "part of rank 0 of 4, and this is rank 1 of 2; make it with num_replicas=2",
        ),
    ],
    ids=["in order", "shuffled", "batch_sampler", "iterator", "other ranks"],
)
def test_what_would_read_other_batches_is_refused_by_name(stream: Stream, message: str) -> None:
    with pytest.raises(DataError, match=message):
        stream.split(Share(1, 2))
