"""Parts of each batch on several ranks: together they are the batches that one process reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep import data
from everstep.contracts.data import Share, Stream
from everstep.data import arrays, as_stream, checked, prefetch
from everstep.data.adapt import describe
from everstep.errors import DataError
from everstep.record import Batch
from everstep.supervisor.streams.run_stream import Ledger
from everstep.supervisor.streams.run_streams import Streams
from everstep.testing import check_stream

SIZES = st.integers(1, 6)
PASSES = st.builds(
    dict,
    length=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
examples = settings(max_examples=60, deadline=None)


def numbers(length: int, **options: Any) -> Stream:
    return arrays(np.arange(length), **options)


def drawn(stream: Stream, share: Share, position: Any = None, pass_index: int = 1) -> list[tuple[Any, float]]:
    """The batches of a pass, each with its weight."""
    cursor = stream.split(share).open("train", pass_index, position, seed=3)
    return [(batch[0], cursor.weight) for batch in cursor]


def ranks(
    stream: Stream, size: int, uneven: Any, position: Any = None
) -> list[tuple[tuple[Any, float], ...]]:
    """By batch, the parts of all ranks; fails where some rank is handed more batches than another."""
    return list(zip(*(drawn(stream, Share(r, size, uneven), position) for r in range(size)), strict=True))


@pytest.mark.parametrize(
    ("length", "uneven", "message"),
    [
        (9, "weight", "has none for some of 4 ranks; give"),
        (11, None, r'does not divide among 4 ranks.*uneven="weight"'),
        (3, "drop", r"no batch is left.*give more samples"),
    ],
)
def test_a_batch_that_the_rule_cannot_split_is_refused(length: int, uneven: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        numbers(length, batch_size=8).split(Share(0, 4, uneven))


@given(PASSES, SIZES)
@examples
def test_dropping_leaves_out_the_last_samples_of_a_batch_and_all_parts_are_alike(
    options: Any, size: int
) -> None:
    stream = numbers(**options)
    kept = [batch[: len(batch) - len(batch) % size].tolist() for batch, _ in drawn(stream, Share())]
    kept = [batch for batch in kept if batch]
    if not kept:
        return
    together = ranks(stream, size, "drop")
    assert [np.concatenate([part for part, _ in parts]).tolist() for parts in together] == kept
    assert all(weight == 1.0 for parts in together for _, weight in parts)
    assert all(len({len(part) for part, _ in parts}) == 1 for parts in together)


class Noisy:
    """Samples with noise from a global generator."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, torch.rand(()).item()])


def noisy_collate(samples: list[Any]) -> Any:
    return torch.stack(samples), torch.rand(2)


def test_samples_of_a_loader_have_the_noise_that_they_have_on_one_process() -> None:
    stream = data.loader(Noisy(), 4, shuffle=True, collate_fn=noisy_collate)
    whole = drawn(stream, Share())
    together = ranks(stream, 3, "pad", {"batches": 1})
    for (batch, _), parts in zip(whole[1:], together, strict=True):
        assert torch.equal(torch.cat([part for part, weight in parts if weight]), batch)


def test_what_a_collate_function_draws_is_keyed_by_the_rank() -> None:
    stream = data.loader(Noisy(), 5, collate_fn=lambda samples: (torch.rand(2),))
    (first, _), (second, _) = ranks(stream, 2, "weight")[0]
    (again, _), _ = ranks(stream, 2, "weight")[0]
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert not torch.equal(first, drawn(stream, Share())[0][0])


@pytest.mark.parametrize("wrap", [prefetch, checked, lambda stream: prefetch(checked(stream))])
def test_wrappers_pass_the_part_and_its_weight_on(wrap: Any) -> None:
    stream = numbers(11, batch_size=4, shuffle=True)
    for share in (Share(0, 3, "weight"), Share(2, 3, "weight")):
        inside = [(part.tolist(), weight) for part, weight in drawn(stream, share)]
        assert [(part.tolist(), weight) for part, weight in drawn(wrap(stream), share)] == inside
        opened = [(part.tolist(), w) for part, w in drawn(wrap(stream), share, {"batches": 2})]
        assert opened == inside[2:]
    check_stream(lambda: wrap(stream))


def test_checked_knows_the_size_of_a_part_and_leaves_no_batch_out() -> None:
    stream = checked(numbers(12, batch_size=6), fixed_batch_size=6)
    assert [[len(part) for part, _ in parts] for parts in ranks(stream, 4, "weight")] == [[2, 2, 1, 1]] * 2
    with pytest.raises(DataError, match="the sizes are '0': 1, not 2"):
        drawn(checked(numbers(10, batch_size=6), fixed_batch_size=6), Share(0, 4, "weight"))
    with pytest.raises(DataError, match=r"leave out a batch on one of 2 ranks alone.*wrong_size=\"error\""):
        checked(numbers(12, batch_size=6), fixed_batch_size=6, wrong_size="warn").split(Share(0, 2))


def test_a_quarantined_batch_takes_its_weight_along() -> None:
    streams = Streams(3, print, quarantined=[Batch("train", 0, 1, None)])
    slot = streams.bind(numbers(11, batch_size=4).split(Share(0, 3, "weight")), "train")
    seen = []
    for _ in range(2):
        seen.append((next(slot.open())[0].tolist(), slot.open().weight))
    assert seen == [([0, 1], 1.5), ([8], 1.0)]
    streams.close()


@pytest.mark.parametrize(
    ("given", "kind"),
    [([1, 2], "list"), (iter([1]), "list_iterator"), (data.replay(range(3)), "range")],
)
def test_data_that_all_ranks_would_read_alike_is_refused_by_name(given: Any, kind: str) -> None:
    stream = as_stream(given)
    assert stream.split(Share(0, 1)) is stream
    with pytest.raises(DataError, match=rf"a {kind} does not say.*each of 2 ranks.*use everstep.data.arrays"):
        stream.split(Share(1, 2))


class Part:
    """Batches of one rank, which say so."""

    num_replicas, rank = 2, 1

    def __iter__(self) -> Any:
        return iter([5, 6])


def test_data_that_says_that_it_splits_itself_is_taken_at_its_word() -> None:
    stream = as_stream(Part()).split(Share(1, 2))
    assert list(stream.open("train", 0, seed=0)) == [5, 6]
    assert describe(stream, 0)["inside"] == {"ranks": 2}  # its places are those of one rank
    with pytest.raises(DataError, match=r"part of rank 1 of 2, and this is rank 0 of 3; make it with"):
        as_stream(Part()).split(Share(0, 3))


def test_batches_that_one_process_read_are_not_compared_with_the_parts_of_a_rank() -> None:
    alone = Ledger("train", Share())
    cursor = as_stream([1, 2, 3]).open("train", 0, seed=0)
    alone.drawn += [10 + next(cursor), 10 + next(cursor)]
    alone.take(cursor)
    parts = Ledger("train", Share(0, 2))
    for ledger in (alone, parts):
        ledger.load(alone.account, 0)
    assert alone.agrees([11, 12], ())
    assert not alone.agrees([11, 13], ())
    assert parts.agrees([1, 2], ())
