"""`check_stream`: a check of a stream against the laws, for authors of streams."""

from __future__ import annotations

import math
import multiprocessing
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np

from everstep import backends
from everstep.contracts.data import Cursor, Share, Stream
from everstep.data.adapt import as_stream
from everstep.errors import DataError, StateError
from everstep.state.random_state import capture, restore, seed_all

_PURPOSE = "train"
_PASSES = 3
_RANKS = (2, 3)
_END = object()


def check_stream(make_stream: Callable[[], Stream], *, seed: int = 0, shares: bool = True) -> None:
    """Check a stream against the laws that concern data.

    1. A pass that is left after any batch and opened again at its position, by a fresh stream and in any
       random state, gives the rest of the pass and the following passes bit for bit, while the step
       between the batches draws from the global random state.
    2. Asking for positions changes nothing.
    3. After its end a pass gives no batch, however often it is asked; `remaining` is right.
    4. Neither a thread nor a process is left after `close`.
    5. The parts of several ranks, for a stream that can be split: equally many batches and the same
       positions on all ranks as on one process; the parts of a batch, without padding, are the batch; their
       weights are right; a position that was taken on one process opens on each rank.

    Args:
        make_stream: makes the stream as a new process would make it; called many times.
        seed: the run's seed, and the seed of the global generators.
        shares: whether law 5 is checked; False for a stream whose batches hold values that are drawn for a
            batch, which each rank draws for its part.
    """
    require_function(make_stream, "check_stream")
    seed_all(seed)
    snapshots: list[_Snapshot] = []
    whole = _read(make_stream(), 0, None, seed, "", snapshots)
    assert all(whole), f"pass {whole.index([]) if [] in whole else 0} gave no batch"
    seed_all(seed)
    unwatched = _read(make_stream(), 0, None, seed, "")
    _require_equal(whole, unwatched, "asking for positions changed what followed: ")
    for at in snapshots:
        seed_all(seed + 1)  # a new process may start in any random state
        rest = _read(make_stream(), at.pass_index, at, seed, f"resumed at {at}: ")
        expected = [whole[at.pass_index][at.batches :], *whole[at.pass_index + 1 :]]
        _require_equal(expected, rest, f"resumed at {at}: ", at.pass_index)
    for size in _RANKS if shares else ():
        _check_shares(make_stream, size, seed)
    with closing(make_stream().open(_PURPOSE, 0, seed=seed)) as cursor:
        if cursor.remaining() is None:
            print(
                "the cursor has no remaining(): a run that is killed in an epoch's tail may resume without "
                "a step, and names that the loop assigns do not exist in the tail"
            )


def require_function(make: Any, check: str) -> None:
    """Require that `make` can be called."""
    assert callable(make), (
        f"{check} got a {type(make).__name__}, but makes a new object for each run: give a function, as in "
        f"{check}(lambda: {type(make).__name__}(...))"
    )


def fingerprint(tree: Any) -> Any:
    """Make a value comparable; objects of unknown types are compared by their repr."""
    return comparable(tree, lambda value: (type(value).__name__, repr(value)))


def comparable(tree: Any, other: Callable[[Any], Any] = lambda value: None) -> Any:
    """Make a comparable copy of a tree of containers, arrays, tensors and plain values, equal bit for bit.

    Args:
        other: makes the stand-in for an object of another type.
    """
    if isinstance(tree, Mapping):
        return [(str(key), comparable(tree[key], other)) for key in sorted(tree, key=str)]
    if isinstance(tree, list | tuple):
        return type(tree).__name__, [comparable(value, other) for value in tree]
    home = backends.of(tree)
    if home is not None and home.pack(tree) is None:
        try:
            host = home.to_host(tree, None)
        except StateError:
            return other(tree)
        return type(tree).__name__, host.dtype, host.shape, host.data.tobytes()
    plain = isinstance(tree, type(None) | bool | int | float | complex | str | bytes)
    return (type(tree).__name__, repr(tree)) if plain else other(tree)


class _Snapshot(NamedTuple):
    """What a checkpoint after a batch holds."""

    pass_index: int
    batches: int
    ended: bool
    position: Any
    random_state: Any

    def __str__(self) -> str:
        return f"pass {self.pass_index}, after {self.batches} batches{' and the end' if self.ended else ''}"


def _read(
    stream: Stream,
    first: int,
    at: _Snapshot | None,
    seed: int,
    where: str,
    snapshots: list[_Snapshot] | None = None,
) -> list[list[Any]]:
    """Read passes from `first` on, the first of them from a snapshot, as a training loop does.

    Returns:
        For each pass the batches that came, each with numbers drawn from the global generators after it.
    """
    passes, before = [], set(threading.enumerate())
    for pass_index in range(first, _PASSES):
        here = f"{where}pass {pass_index}: "
        if pass_index == first and at is not None:
            cursor = stream.open(_PURPOSE, pass_index, at.position, seed=seed)
            again = cursor.position()
            assert fingerprint(again) == fingerprint(at.position), (
                f"{here}opened at {at.position!r}, the cursor says that it stands at {again!r}"
            )
            restore(at.random_state)
            fresh = not at.batches and not at.ended
        else:
            cursor, fresh = stream.open(_PURPOSE, pass_index, seed=seed), True
        passes.append(_drain(cursor, pass_index, fresh, here, snapshots))
        for _ in range(2):
            cursor.close()
        alive = set(threading.enumerate()) - before
        threads = [thread.name for thread in alive if "everstep" in thread.name]
        assert not threads, f"{here}threads {threads} are alive after close()"
        children = multiprocessing.active_children()
        assert not children, f"{here}processes {children} are alive after close()"
    return passes


def _drain(
    cursor: Cursor, pass_index: int, fresh: bool, where: str, snapshots: list[_Snapshot] | None
) -> list[Any]:
    batches: list[Any] = []

    def snapshot(ended: bool = False) -> None:
        if snapshots is not None:
            position = cursor.position()
            snapshots.append(_Snapshot(pass_index, len(batches), ended, position, capture()))

    remaining = cursor.remaining()
    snapshot()
    if fresh:  # a program may draw between the opening of a pass and its first batch
        _draw()
    while (batch := next(cursor, _END)) is not _END:
        batches.append((fingerprint(batch), _draw()))
        snapshot()
    assert remaining in (None, len(batches)), (
        f"{where}remaining() said {remaining} batches, {len(batches)} came"
    )
    snapshot(ended=True)
    for _ in range(2):
        assert next(cursor, _END) is _END, f"{where}a batch came after the end of the pass"
    return batches


def _draw() -> Any:
    torch = sys.modules.get("torch")
    return random.random(), np.random.rand(), torch and torch.rand(()).item()


def _require_equal(expected: list[list[Any]], passes: list[list[Any]], law: str, first: int = 0) -> None:
    for pass_index, (left, right) in enumerate(zip(expected, passes, strict=True), first):
        where = f"{law}pass {pass_index}"
        assert len(right) == len(left), f"{where}: {len(right)} batches came instead of {len(left)}"
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            here = f"batch {index} from there differs"
            assert one[0] == other[0], f"{where}: {here}"
            assert one[1] == other[1], f"{where}: the global random state after {here}"


# ------------------------------------------------------------------------- parts of several ranks


class _Part(NamedTuple):
    """A rank's part of a batch, or a whole batch, made comparable, with the position after it."""

    samples: dict[str, list[Any]]
    """Samples in each part of the batch."""
    weight: float
    position: Any
    shared_position: Any
    """The position without what is each rank's own."""


def _check_shares(make_stream: Callable[[], Stream], size: int, seed: int) -> None:
    shares = [Share(rank, size, "pad") for rank in range(size)]
    try:
        for share in shares:
            as_stream(make_stream()).split(share)
    except DataError:
        return
    whole = _parts(make_stream, None, seed)
    for start in sorted({0, len(whole) // 2}):
        position = whole[start - 1].position if start else None
        ranks = [_parts(make_stream, share, seed, position) for share in shares]
        where, counts = f"{size} ranks, opened after {start} batches", [len(parts) for parts in ranks]
        assert set(counts) == {len(whole) - start}, (
            f"{where}: {counts} batches came instead of {len(whole) - start} each"
        )
        for index, (batch, *parts) in enumerate(zip(whole[start:], *ranks, strict=True)):
            _check_parts(batch, parts, f"{where}: batch {index} from there")


def _check_parts(batch: _Part, parts: list[_Part], where: str) -> None:
    together: dict[str, list[Any]] = {name: [] for name in batch.samples}
    for rank, part in enumerate(parts):
        assert part.shared_position == batch.shared_position, f"{where}: rank {rank} is elsewhere"
        assert part.samples.keys() == together.keys(), f"{where}: a rank's batch has other parts"
        for name, samples in part.samples.items():
            together[name] += samples if part.weight else []
            right = len(samples) * len(parts) / len(batch.samples[name])
            assert part.weight == 0 or math.isclose(part.weight, right), (
                f"{where}: the weight is {part.weight}, {right} would make the mean over ranks the mean"
            )
    assert together == batch.samples, f"{where}: the parts of the ranks are not the batch"


def _parts(
    make_stream: Callable[[], Stream], share: Share | None, seed: int, position: Any = None
) -> list[_Part]:
    seed_all(seed)
    stream = as_stream(make_stream())
    stream = stream if share is None else stream.split(share)
    parts = []
    with closing(stream.open(_PURPOSE, 0, position, seed=seed)) as cursor:
        for batch in cursor:
            position = shared = cursor.position()
            if stream.rank_keys:
                shared = {key: value for key, value in position.items() if key not in stream.rank_keys}
            parts.append(_Part(dict(_samples(batch)), cursor.weight, position, fingerprint(shared)))
    return parts


def _samples(batch: Any, name: str = "batch") -> Iterator[tuple[str, list[Any]]]:
    """Yield the samples in each part of a batch; values without a length belong to no sample."""
    if isinstance(batch, Mapping):
        for key, part in batch.items():
            yield from _samples(part, f"{name}.{key}")
    elif isinstance(batch, tuple) or (isinstance(batch, list) and all(hasattr(p, "shape") for p in batch)):
        for number, part in enumerate(batch):
            yield from _samples(part, f"{name}.{number}")
    elif hasattr(batch, "__len__") and getattr(batch, "shape", 1) != ():
        yield name, [fingerprint(sample) for sample in batch]
