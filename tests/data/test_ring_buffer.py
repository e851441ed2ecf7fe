"""The replay memory: what it holds, what a save copies of it, and that no stale copy is left alone."""

from __future__ import annotations

import copy
import pickle
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everstep.data import RingBuffer, ring_buffer
from everstep.errors import ConfigError, DataError, RestoreError, StateError
from everstep.state import Buffers, decode, digest, encode, note_digests
from tiny_runs import quiet, supervised


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 items of "x"."""
    monkeypatch.setattr(ring_buffer, "CHUNK", 32)


def made(capacity: int = 20) -> RingBuffer:
    return RingBuffer(capacity, {"x": ("float32", (2,)), "n": "int64"})


def put(memory: RingBuffer, *numbers: int) -> None:
    memory.extend(x=np.repeat(np.array(numbers, np.float32), 2).reshape(-1, 2), n=np.array(numbers))


def held(memory: RingBuffer) -> list[int]:
    """The numbers in a memory by age, once from each field."""
    items = memory[:]
    assert items["x"].tolist() == [[n, n] for n in items["n"].tolist()]
    return [int(n) for n in items["n"]]


def test_it_is_a_deque_of_items() -> None:
    memory, expected, rng = made(), deque[int](maxlen=20), random.Random(0)
    for at in range(0, 200, 5):
        numbers = [(at + i) % 100 for i in range(rng.choice([0, 1, 3, 7, 20, 45]))]
        put(memory, *numbers)
        expected.extend(numbers)
        if rng.random() < 0.2:
            memory.clear()
            expected.clear()
        memory.append(x=torch.full((2,), at % 100.0, requires_grad=True), n=at % 100)
        expected.append(at % 100)
        assert held(memory) == list(expected) and len(memory) == len(expected)
        assert memory[0]["n"] == expected[0] and memory[-1]["n"] == expected[-1]
        assert memory[[0, -1, 0]]["n"].tolist() == [expected[0], expected[-1], expected[0]]


def test_update_writes_to_single_items_and_the_last_of_equal_places_counts() -> None:
    memory = made()
    put(memory, *range(30))
    memory.update([0, 3, 0, -1], n=[5, 6, 7, 8])
    assert memory[[0, 3, -1]]["n"].tolist() == [7, 6, 8]


def test_what_is_read_is_a_copy_and_the_live_arrays_cannot_be_written_to() -> None:
    memory = made()
    put(memory, 1, 2, 3)
    for copied in (memory[0], memory[:], memory[0:2], memory.sample(2)):
        copied["x"][...] = 99
    assert held(memory) == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        memory.state_dict()["chunks"]["x"][0][0] = 99


def of_kind(kind: str, item: Any) -> Any:
    """An item, in a memory for this kind of number, and out of it."""
    memory = RingBuffer(2, {"a": kind})
    memory.append(a=item)
    return memory[0]["a"]


ODD_FIELDS: list[Any] = [{}, {"x": object}, {"x": "nothing"}, {"a b": "uint8"}, {"x": ("uint8", ("a",))}]
TOO_LARGE = "items cannot have the field 'x' .*give a capacity that fits"
REFUSED: list[tuple[Callable[[RingBuffer], object], type[Exception], str]] = [
    (lambda memory: memory.append(x=[1, 2]), DataError, "lacks 'n'"),
    (lambda memory: memory.append(x=[1, 2], n=1, m=2), DataError, "no field 'm'"),
    (lambda memory: memory.append(x=[1], n=1), DataError, r"'x' takes the shape \(2,\), got \(1,\)"),
    (lambda memory: memory.append(x=[1, 2], n=1.5), DataError, "'n'"),
    (lambda memory: memory.append(x=[1, 2], n="a"), DataError, "'n'"),
    (lambda memory: memory.extend(x=np.zeros((2, 2)), n=[1]), DataError, "different numbers of items"),
    (lambda memory: memory[1], IndexError, "no item 1"),
    (lambda _: made().sample(1), DataError, "empty"),
    (lambda _: of_kind("uint8", 300), DataError, "300.* does not fit"),
    (lambda _: of_kind("int8", 300), DataError, "300.* does not fit"),
    (lambda _: of_kind("int8", np.uint8(200)), DataError, "200.* does not fit"),
    (lambda _: of_kind("int64", 1 << 63), DataError, f"{1 << 63}.* does not fit"),
    *((lambda _, fields=fields: RingBuffer(2, fields), ConfigError, "field|shape") for fields in ODD_FIELDS),
    *(
        (lambda _, n=n: RingBuffer(n, {"x": "float32"}), ConfigError, TOO_LARGE)
        for n in (2**46, 2**62, 2**70)
    ),
]


def test_what_is_refused_changes_nothing() -> None:
    memory = made()
    put(memory, 1)
    for call, error, words in REFUSED:
        with pytest.raises(error, match=words):
            call(memory)
        assert held(memory) == [1]
    assert of_kind("int8", np.int64(-3)) == -3


def copied(memory: RingBuffer, buffers: Buffers) -> set[str]:
    """Take a snapshot; returns the names of the arrays that were copied, not left alone."""
    before = set(buffers.arrays)
    encoded = encode({"memory": memory.state_dict()}, buffers)
    # a copy forgets the digest
    found = {name for name, host in encoded.arrays.items() if host.xxh3_128 is None or name not in before}
    note_digests(encoded)
    assert digest(encoded) == digest(encode({"memory": memory.state_dict()}))
    return {name.removeprefix("memory/chunks/") for name in found}


def test_only_chunks_that_were_written_to_are_copied_again() -> None:
    memory, buffers = made(), Buffers()
    put(memory, *range(20))
    everything = {f"{field}/{i}" for field in "xn" for i in range(len(memory.state_dict()["chunks"][field]))}
    assert copied(memory, buffers) == everything and copied(memory, buffers) == set()
    memory.append(x=[5, 5], n=5)
    assert copied(memory, buffers) == {"x/0", "n/0"}
    memory.update([-2], n=[3])
    assert copied(memory, buffers) == {"n/4"}
    memory.sample(5)
    memory[:]
    assert copied(memory, buffers) == set()


def test_a_memory_that_is_being_filled_has_the_same_state_however_it_came_there() -> None:
    memory = made(19)
    for count in range(1, 20):
        put(memory, count)
        state = decode(encode({"memory": memory.state_dict()}))["memory"]
        again = made(19)
        put(again, *range(count + 3))
        again.load_state_dict(state)
        assert held(again) == held(memory) and len(again) == count
        put(again, 7), put(other := copy.deepcopy(memory), 7)
        assert digest(encode(again.state_dict())) == digest(encode(other.state_dict()))
        assert len(state["chunks"]["x"]) == -(-count // 4)


@pytest.mark.parametrize("fork", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_the_memory_is_another_memory(fork: Any) -> None:
    memory, buffers = made(), Buffers()
    put(memory, *range(20))
    everything = copied(memory, buffers)
    other = fork(memory)
    put(other, 50)
    assert held(memory) == list(range(20)) and held(other) == [*range(1, 20), 50]
    assert copied(other, buffers) == everything and copied(memory, buffers) == everything
    assert copied(memory, buffers) == set()


def test_whatever_happens_between_snapshots_each_is_right() -> None:
    """`copied` compares each snapshot with one into new memory."""
    rng, memory, buffers = random.Random(1), made(), [Buffers(), Buffers()]
    saved = [decode(encode(memory.state_dict()))]
    for at in range(300):
        act = rng.randrange(9)
        if act < 3:
            put(memory, *(i % 100 for i in range(at, at + rng.choice([1, 1, 2, 9, 30]))))
        elif act == 3 and len(memory):
            memory.update([rng.randrange(len(memory))], x=[[at % 100] * 2], n=[at % 100])
        elif act == 4:
            saved.append(decode(encode(memory.state_dict(), rng.choice(buffers))))
        elif act == 5:
            memory.load_state_dict(rng.choice(saved))
        elif act == 6:
            memory = copy.deepcopy(memory)
        elif act == 7:
            with pytest.raises(StateError):
                encode({"memory": memory.state_dict(), "z": object()}, rng.choice(buffers))
        copied(memory, rng.choice(buffers))


OTHERS: list[tuple[RingBuffer, str]] = [
    (made(13), "memory/capacity 20 -> 13"),
    (RingBuffer(20, {"x": ("float64", (2,)), "n": "int64"}), "memory/fields/x float32"),
    (RingBuffer(20, {"x": ("float32", (2,)), "n": "int64", "more": "bool"}), "memory/fields/more"),
]


def test_another_memory_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    """That a resume samples the same: laws/test_zoo.py."""
    put(memory := made(), 1)
    supervised(quiet(tmp_path, {"memory": memory}, max_step=1))
    for other, told in OTHERS:
        with pytest.raises(RestoreError, match=told):
            quiet(tmp_path, {"memory": other}, max_step=2).__enter__()
        assert len(other) == 0
    with pytest.raises(RestoreError, match="a list -> a RingBuffer"):
        made().load_state_dict([])  # type: ignore[arg-type]
