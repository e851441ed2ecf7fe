"""Batches that are not what the step expects: ignored, warned about once, or an error that names them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import everstep
from everstep.contracts.data import Cursor, Stream
from everstep.errors import DataError
from everstep.testing import check_stream

GOOD = {"x": np.zeros(2), "y": np.zeros(2)}
BAD: dict[str, tuple[Any, str]] = {
    "empty_batch": (
        {"x": np.zeros(0), "y": np.zeros(0)},
        r"a batch is empty \(sizes 'x': 0, 'y': 0\)",
    ),
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


def test_tuples_and_single_arrays_have_parts_too() -> None:
    assert len(list(everstep.data.checked([np.zeros(3)]).open("train", 0, seed=1))) == 1
    with pytest.raises(DataError, match="sizes '0': 2, '1': 3"):
        list(everstep.data.checked([(np.zeros(2), np.zeros(3))]).open("train", 0, seed=1))


def test_parts_may_lie_in_one_another_and_need_no_length() -> None:
    good = {
        "image": (np.zeros(2), {"mask": np.zeros(2)}),
        "names": ["a", "b"],
        "split": "valid",
        "scale": 1.5,
    }
    assert len(list(everstep.data.checked([good, [1.0]]).open("train", 0, seed=1))) == 2
    bad = {"image": (np.zeros(2), {"mask": np.zeros(3)})}
    with pytest.raises(DataError, match=r"sizes 'image\.0': 2, 'image\.1\.mask': 3"):
        list(everstep.data.checked([bad]).open("train", 0, seed=1))


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


def test_what_is_left_out_is_left_out_at_a_resume_too() -> None:
    batches = [[], [1], [], [2, 3], [], [4], [5]]
    check_stream(
        lambda: everstep.data.checked(batches, fixed_batch_size=1, wrong_size="ignore", empty_batch="ignore")
    )


class Uncounted(Stream):
    """Three batches a pass; its cursor has a position and no `done`."""

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        return UncountedCursor(position or 0)


class UncountedCursor(Cursor):
    def __init__(self, at: int) -> None:
        self.at = at

    def __next__(self) -> Any:
        if self.at == 3:
            raise StopIteration
        self.at += 1
        return np.full(2, self.at)

    def position(self) -> int:
        return self.at


@pytest.mark.parametrize("prefetched", [False, True])
def test_a_resume_after_the_last_batch_of_a_pass_is_no_empty_pass(prefetched: bool) -> None:
    source = everstep.data.prefetch(Uncounted()) if prefetched else Uncounted()
    stream = everstep.data.checked(source)
    begun = stream.open("train", 0, seed=1)
    next(begun), next(begun), next(begun)
    position = begun.position()
    begun.close()
    assert list(stream.open("train", 0, position, seed=1)) == []


def test_a_resume_at_the_start_of_an_empty_pass_is_one() -> None:
    stream = everstep.data.checked([])
    with pytest.raises(DataError, match="no batch in a whole pass"):
        list(stream.open("train", 0, stream.open("train", 0, seed=1).position(), seed=1))
