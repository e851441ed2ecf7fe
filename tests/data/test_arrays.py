"""`arrays` and `checked`: batches from memory, their order, those that are refused, and parts of ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import everstep
from counting import Uncounted
from everstep.contracts.data import Cursor, Share, Stream
from everstep.data import arrays, as_stream, checked, loader, prefetch, replay, stateful
from everstep.data.adapt import describe
from everstep.data.order import key_at, pass_key, permutation
from everstep.errors import ConfigError, DataError, NotResumableError, UsageError
from everstep.record import Batch
from everstep.supervisor.streams.all_streams import Streams
from everstep.supervisor.streams.run_stream import Ledger
from everstep.testing.checks import check_stream

X = np.arange(22, dtype=np.float32).reshape(11, 2)
Y = torch.arange(11)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_laws(shuffle, drop_last):
    check_stream(lambda: arrays(X, Y, batch_size=3, shuffle=shuffle, drop_last=drop_last))


@pytest.mark.parametrize("make", [
    lambda: torch.rand(11), lambda: torch.rand(11, 3, 4, 4),
    lambda: torch.rand(11, 3, 4, 4).to(memory_format=torch.channels_last),
    lambda: torch.rand(2, 11).T, lambda: torch.rand(22, 2)[::2], lambda: torch.rand(11, 2) > 0.5,
    lambda: torch.rand(11, 2, dtype=torch.complex64), lambda: torch.nn.Parameter(torch.rand(11, 2)),
    lambda: np.random.default_rng(0).random((11, 2), np.float32)[:, ::-1],
    lambda: np.array([f"word {n}" for n in range(11)]), lambda: np.ma.masked_less(np.arange(11), 4),
], ids=[f"layout-{number}" for number in range(11)])  # fmt: skip
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
    assert cursor.remaining() == 2 and cursor.position()["batches"] == 1
    cursor.close()
    assert cursor.position()["batches"] == 1
    with pytest.raises(UsageError, match="closed after 1 batches; open a new one"):
        next(cursor)


def test_golden_values_never_change():
    assert permutation(8, 0, "train", 0).tolist() == [0, 4, 7, 3, 2, 6, 1, 5]
    assert sample_key(0, "train", 0, 0) == 2743965348293048278


def sample_key(seed, purpose, pass_index, position):
    return key_at(pass_key("sample", seed, purpose, pass_index), position)


@given(st.integers(0, 300), st.integers(-5, 2**70), st.text(max_size=5), st.integers(0, 10))
@settings(max_examples=50, deadline=None)
def test_a_permutation_is_one_and_is_pure(length, seed, purpose, pass_index):
    order = permutation(length, seed, purpose, pass_index)
    assert order.dtype == np.int64 and sorted(order.tolist()) == list(range(length))
    assert np.array_equal(order, permutation(length, seed, purpose, pass_index))
    # each part of the key matters
    wheres = [(seed, purpose, pass_index), (seed + 1, purpose, pass_index), (seed, purpose + "x", pass_index)]
    wheres.append((seed, purpose, pass_index + 1))
    assert len({sample_key(*where, 0) for where in wheres} | {sample_key(*wheres[0], 1)}) == 5
    assert length < 30 or len({tuple(permutation(length, *where)) for where in wheres}) == 4


GOOD = {"x": np.zeros(2), "y": np.zeros(2)}
BAD: dict[str, tuple[Any, str]] = {
    "empty_batch": ({"x": np.zeros(0), "y": np.zeros(0)}, r"a batch is empty \(sizes 'x': 0, 'y': 0\)"),
    "unequal_lengths": ({"x": np.zeros(2), "y": np.zeros(1)}, r"not equally long \(sizes 'x': 2, 'y': 1\)"),
    "missing_source": ({"x": np.zeros(2), "yy": np.zeros(2)}, r"no source 'y'; did you mean 'yy'"),
    "unused_source": ({**GOOD, "name": ["a", "b"]}, r"nothing uses 'name'"),
    "wrong_size": ({"x": np.zeros(1), "y": np.zeros(1)}, r"the sizes are 'x': 1, 'y': 1, not 2"),
}


def read(kind: str, policy: str) -> int:
    """Read a pass with a good and two bad batches; how many were handed out."""
    bad = BAD[kind][0]
    others = {name: "ignore" for name in BAD if name != kind}
    options: Any = {**others, kind: policy}
    data = everstep.data.checked([GOOD, bad, bad], sources=("x", "y"), fixed_batch_size=2, **options)
    return len(list(data.open("train", 0, seed=1)))


@pytest.mark.parametrize("kind", BAD)
def test_each_policy_of_each_kind(kind: str) -> None:
    message = BAD[kind][1]
    handed_out = 1 if kind in ("empty_batch", "wrong_size") else 3
    assert read(kind, "ignore") == handed_out
    with pytest.warns(RuntimeWarning, match=message) as told:
        assert read(kind, "warn") == handed_out
    assert len(told) == 1
    with pytest.raises(DataError, match=f"stream 'train', pass 1, batch 2: .*{message}"):
        read(kind, "error")


def test_parts_are_single_arrays_tuples_or_lie_in_one_another_and_need_no_length() -> None:
    good = {"image": (np.zeros(2), {"mask": np.zeros(2)}), "names": ["a", "b"], "split": "test", "scale": 1.5}
    assert len(list(checked([good, [1.0], np.zeros(3)]).open("train", 0, seed=1))) == 3
    two, three = np.zeros(2), np.zeros(3)
    bad = {r"'0': 2, '1': 3.*make them": (two, three)}
    bad[r"'image\.0': 2, 'image\.1\.mask': 3"] = {"image": (two, {"mask": three})}
    for sizes, batch in bad.items():
        with pytest.raises(DataError, match=f"sizes {sizes}"):
            list(checked([batch]).open("train", 0, seed=1))


def test_a_pass_without_a_batch() -> None:
    def read_empty(policy: Any, data: Any = ()) -> list[Any]:
        stream = everstep.data.checked(list(data), empty_stream=policy, empty_batch="ignore")
        return [*stream.open("valid", 0, seed=1), *stream.open("valid", 1, seed=1)]

    assert read_empty("ignore") == read_empty("ignore", [()]) == []
    with pytest.warns(RuntimeWarning, match="stream 'valid', pass 1: no batch in a whole pass") as told:
        read_empty("warn")
    assert len(told) == 1
    with pytest.raises(DataError, match='or pass empty_stream="ignore"'):
        read_empty("error", [[], []])
    empty = checked([])  # also from its start on
    with pytest.raises(DataError, match="no batch in a whole pass"):
        list(empty.open("train", 0, empty.open("train", 0, seed=1).position(), seed=1))


@pytest.mark.parametrize("prefetched", [False, True])
def test_the_number_of_a_batch_is_that_of_the_pass_also_after_a_resume(prefetched: bool) -> None:
    data = everstep.data.checked([GOOD, GOOD, GOOD, BAD["unequal_lengths"][0]])
    stream = everstep.data.prefetch(data) if prefetched else data
    begun = stream.open("train", 2, seed=1)
    next(begun), next(begun)
    position = begun.position()
    begun.close()
    with pytest.raises(DataError, match="stream 'train', pass 3, batch 4: the parts"):
        list(stream.open("train", 2, position, seed=1))


@pytest.mark.parametrize("wrap", [lambda stream: stream, everstep.data.prefetch])
def test_what_is_left_out_is_left_out_at_a_resume_too(wrap: Callable[[Stream], Stream]) -> None:
    batches = [[], [1], [], [2, 3], [], [4], [5]]
    how: Any = {"fixed_batch_size": 1, "wrong_size": "ignore", "empty_batch": "ignore"}
    check_stream(lambda: wrap(everstep.data.checked(batches, **how)))
    cursor = wrap(everstep.data.checked(batches, **how)).open("train", 0, seed=1)
    assert list(cursor) == [[1], [2, 3], [4], [5]] and cursor.passed_over() == [0, 2, 4]


@pytest.mark.parametrize("prefetched", [False, True])
def test_a_resume_after_the_last_batch_of_a_pass_is_no_empty_pass(prefetched: bool) -> None:
    source = Uncounted(as_stream([np.full(2, at) for at in range(3)]))
    stream = checked(prefetch(source) if prefetched else source)
    begun = stream.open("train", 0, seed=1)
    next(begun), next(begun), next(begun)
    position = begun.position()
    begun.close()
    assert list(stream.open("train", 0, position, seed=1)) == []


ROWS = np.zeros((11, 2))
SAMPLES = TensorDataset(torch.arange(4))


class Lines:
    def __iter__(self) -> Any:
        return iter(range(3))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class Unsized:
    def __getitem__(self, index: int) -> int:
        return index


DECLARED = r"without everstep\.data\.stateful"
WARNS: Any = {"fixed_batch_size": 2, "wrong_size": "warn"}
ALIKE = "does not say.*each of 2 ranks.*use everstep.data.arrays"
REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: arrays(batch_size=2), DataError, "no array; give it at least one"),
    (lambda: arrays(ROWS, ROWS[:4], batch_size=2), DataError, r"different lengths \[11, 4\]"),
    (lambda: arrays([1, 2], batch_size=2), DataError, "given a list; give NumPy arrays"),
    (lambda: arrays(np.float32(3), batch_size=2), DataError, "given a float32"),
    (lambda: arrays(np.array(3), batch_size=2), DataError, r"an array of shape \(\)"),
    (lambda: arrays(ROWS, batch_size=0), ConfigError, "batch_size=0: give an integer, 1 or more"),
    (lambda: arrays(ROWS, batch_size=1, seed="x"), ConfigError, "seed='x': give an integer, or None"),  # type: ignore[arg-type]
    (lambda: loader(Endless(), 2), DataError, "a Endless, whose samples cannot be fetched by index; give"),
    (lambda: loader(DataLoader(SAMPLES), 2), DataError, "given a DataLoader"),
    (lambda: loader(Unsized(), 2), DataError, "a Unsized without a length; give it __len__"),
    (lambda: loader([], 2), DataError, "0 samples"),
    (lambda: loader(SAMPLES, 0), ConfigError, "batch_size=0"),
    (lambda: loader(SAMPLES, 2, prefetch_factor=3), ValueError, "prefetch_factor"),
    (lambda: prefetch([1], 0), ConfigError, "buffer=0: give an integer, 1 or more"),
    (lambda: prefetch([1], 1.5), ConfigError, "buffer=1.5: give an integer, 1 or more"),  # type: ignore[arg-type]
    (lambda: prefetch(loader(SAMPLES, 2)), ConfigError, "give the loader itself, with num_workers=1"),
    (lambda: prefetch(DataLoader(SAMPLES)), ConfigError, "give the DataLoader itself, with num_workers=1"),
    (lambda: checked([], empty_batch="warning"), ConfigError, "did you mean 'warn'"),  # type: ignore[arg-type]
    (lambda: checked([], empty_batches="warn"), ConfigError, "did you mean 'empty_batch'"),  # type: ignore[call-arg]
    (lambda: checked([], sources="image"), ConfigError, "sources='image': give a list of keys"),
    (lambda: Share(2, 2), ConfigError, "rank=2, size=2: give a rank"),
    (lambda: Share(0, 2, "weigh"), ConfigError, "did you mean 'weight'"),  # type: ignore[arg-type]
    (lambda: stateful(iter([1])), NotResumableError, "neither state_dict and load_state_dict nor"),
    (lambda: stateful(Lines()).open("train", 0, seed=0).position(), NotResumableError, DECLARED),
    (lambda: prefetch(stateful(Lines())).open("train", 0, seed=0).position(), NotResumableError, DECLARED),
    (
        lambda: numbers(9, batch_size=8).split(Share(0, 4, "weight")),
        DataError,
        "none for some of 4 ranks; give",
    ),
    (lambda: numbers(11, batch_size=8).split(Share(0, 4)), DataError, 'among 4 ranks.*uneven="weight"'),
    (
        lambda: numbers(3, batch_size=8).split(Share(0, 4, "drop")),
        DataError,
        "no batch is left.*more samples",
    ),
    (
        lambda: checked(numbers(4, batch_size=2), **WARNS).split(Share(0, 2)),
        DataError,
        "on one of 2 ranks alone",
    ),
    (lambda: as_stream([1, 2]).split(Share(1, 2)), DataError, f"a list {ALIKE}"),
    (lambda: as_stream(iter([1])).split(Share(1, 2)), DataError, f"a list_iterator {ALIKE}"),
    (lambda: replay(range(3)).split(Share(1, 2)), DataError, f"a range {ALIKE}"),
    (
        lambda: as_stream(Part()).split(Share(0, 3)),
        DataError,
        "rank 1 of 2, and this is rank 0 of 3; make it",
    ),
    (lambda: as_stream("digits.npz"), DataError, "str 'digits.npz' does not give batches.* list of batches"),
    (lambda: as_stream({"x": 1}), DataError, r"dict .*everstep\.data\.arrays\(\*data\.values\(\)"),
    (lambda: as_stream(np.ones(3)), DataError, r"ndarray .*everstep\.data\.arrays"),
    (lambda: as_stream(torch.ones(3)), DataError, r"Tensor .*everstep\.data\.arrays"),
    (lambda: as_stream(SAMPLES), DataError, r"TensorDataset .*everstep\.data\.loader"),
    (lambda: as_stream(Lines), DataError, r"type .*give an object: Lines\(\.\.\.\)"),
    (lambda: as_stream(len), DataError, r"builtin_function.*call it"),
    (lambda: as_stream(SimpleNamespace(own=DataLoader(SAMPLES))), DataError, "DataLoader inside it, .*'own'"),
    (lambda: as_stream(SimpleNamespace(open=open)), DataError, "SimpleNamespace from everstep.data.Stream"),
    (lambda: as_stream(None), DataError, r"NoneType None does not give batches.*everstep\.data\.arrays"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED, ids=[words[:40] for *_, words in REFUSED])
def test_what_is_refused(call: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_any_object_with_a_length_and_items_can_be_loaded() -> None:
    [x] = next(loader([(torch.tensor(1),)] * 4, 2).open("train", 0, seed=0))
    assert x.tolist() == [1, 1]


SIZES = st.integers(1, 6)
FLAGS = {"shuffle": st.booleans(), "drop_last": st.booleans()}
PASSES = st.builds(dict, length=st.integers(1, 40), batch_size=st.integers(1, 12), **FLAGS)


def numbers(length: int, **options: Any) -> Stream:
    return arrays(np.arange(length), **options)


def drawn(stream: Stream, share: Share, position: Any = None, pass_index: int = 1) -> list[tuple[Any, float]]:
    """The batches of a pass, each with its weight."""
    cursor = stream.split(share).open("train", pass_index, position, seed=3)
    return [(batch[0], cursor.weight) for batch in cursor]


def ranks(stream: Stream, size: int, uneven: Any, position: Any = None) -> list[Any]:
    """By batch, the parts of all ranks; fails where some rank is handed more batches than another."""
    return list(zip(*(drawn(stream, Share(r, size, uneven), position) for r in range(size)), strict=True))


@given(PASSES, SIZES)
@settings(max_examples=60, deadline=None)
def test_dropping_leaves_out_the_last_samples_and_all_parts_are_alike(options: Any, size: int) -> None:
    stream = numbers(**options)
    kept = [batch[: len(batch) - len(batch) % size].tolist() for batch, _ in drawn(stream, Share())]
    kept = [batch for batch in kept if batch]
    if not kept:
        return
    together = ranks(stream, size, "drop")
    assert [np.concatenate([part for part, _ in parts]).tolist() for parts in together] == kept
    assert all(weight == 1.0 for parts in together for _, weight in parts)
    assert all(len({len(part) for part, _ in parts}) == 1 for parts in together)


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


def test_a_quarantined_batch_takes_its_weight_along() -> None:
    streams = Streams(3, print, quarantined=[Batch("train", 0, 1, None)])
    slot = streams.bind(numbers(11, batch_size=4).split(Share(0, 3, "weight")), "train")
    seen = []
    for _ in range(2):
        seen.append((next(slot.open())[0].tolist(), slot.open().weight))
    assert seen == [([0, 1], 1.5), ([8], 1.0)]
    streams.close()


class Part:
    """Batches of one rank, which say so."""

    num_replicas, rank = 2, 1

    def __iter__(self) -> Any:
        return iter([5, 6])


def test_data_that_says_that_it_splits_itself_is_taken_at_its_word() -> None:
    stream = as_stream(Part()).split(Share(1, 2))
    assert list(stream.open("train", 0, seed=0)) == [5, 6]
    assert describe(stream, 0)["inside"] == {"ranks": 2}  # its places are those of one rank
    alone = as_stream([1, 2])
    assert alone.split(Share(0, 1)) is alone


def test_batches_that_one_process_read_are_not_compared_with_the_parts_of_a_rank() -> None:
    alone = Ledger("train", Share())
    cursor = as_stream([1, 2, 3]).open("train", 0, seed=0)
    alone.drawn += [10 + next(cursor), 10 + next(cursor)]
    alone.account_for(cursor)
    parts = Ledger("train", Share(0, 2))
    for ledger in (alone, parts):
        ledger.load(alone.account, 0)
    assert alone.agrees([11, 12], ()) and not alone.agrees([11, 13], ())
    assert parts.agrees([1, 2], ())
