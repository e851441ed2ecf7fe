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

from everstep.contracts.data import Cursor, Share, Stream
from everstep.data.adapt import as_stream
from everstep.errors import DataError
from everstep.testing.stream_trial import comparable

_PURPOSE = "train"
_PASSES = 3
_RANKS = (2, 3)


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

    Raises:
        AssertionError: names the broken law, the pass and the batch.
    """
    require_function(make_stream, "check_stream")
    whole = _run(make_stream, seed)
    for pass_index, events in enumerate(whole.passes):
        assert events, f"pass {pass_index} gave no batch"
    _equal(whole, _run(make_stream, seed, watched=False), "asking for positions changed what followed")
    for snapshot in whole.snapshots:
        _check_resume(make_stream, whole, snapshot, seed)
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


class _Snapshot(NamedTuple):
    pass_index: int
    batches: int
    ended: bool
    position: Any
    globals: Any

    def __str__(self) -> str:
        return f"pass {self.pass_index}, after {self.batches} batches{' and the end' if self.ended else ''}"


class _Trace(NamedTuple):
    passes: list[list[Any]]
    snapshots: list[_Snapshot]


def _run(make_stream: Callable[[], Stream], seed: int, *, watched: bool = True) -> _Trace:
    """Read a few passes undisturbed, and note what a checkpoint after each batch would hold."""
    _seed_globals(seed)
    stream = make_stream()
    trace = _Trace([], [])
    for pass_index in range(_PASSES):
        cursor = stream.open(_PURPOSE, pass_index, seed=seed)
        events: list[Any] = []
        _drain(cursor, pass_index, events, trace.snapshots if watched else None)
        trace.passes.append(events)
        _close(cursor, f"pass {pass_index}")
    return trace


def _drain(
    cursor: Cursor,
    pass_index: int,
    events: list[Any],
    snapshots: list[_Snapshot] | None = None,
    *,
    fresh: bool = True,
) -> None:
    """Take the rest of a pass as a training loop does, with random numbers drawn in each step."""

    def snapshot(ended: bool) -> None:
        if snapshots is not None:
            snapshots.append(_Snapshot(pass_index, len(events), ended, cursor.position(), _get_globals()))

    remaining = cursor.remaining()
    taken = 0
    snapshot(False)
    if fresh:  # a program may draw between the opening of a pass and its first batch
        _draw_globals()
    while True:
        try:
            batch = next(cursor)
        except StopIteration:
            break
        taken += 1
        events.append((fingerprint(batch), _draw_globals()))
        snapshot(False)
    assert remaining in (None, taken), (
        f"pass {pass_index}: remaining() said {remaining} batches, {taken} came"
    )
    snapshot(True)
    for _ in range(2):
        assert next(cursor, _END) is _END, f"pass {pass_index}: a batch came after the end of the pass"


def _check_resume(make_stream: Callable[[], Stream], whole: _Trace, at: _Snapshot, seed: int) -> None:
    _seed_globals(seed + 1)  # a new process may start in any random state
    stream = make_stream()
    cursor = stream.open(_PURPOSE, at.pass_index, at.position, seed=seed)
    again = cursor.position()
    assert fingerprint(again) == fingerprint(at.position), (
        f"{at}: opened at {at.position!r}, the cursor says that it stands at {again!r}"
    )
    _set_globals(at.globals)
    rest: list[Any] = []
    _drain(cursor, at.pass_index, rest, fresh=not at.batches and not at.ended)
    _close(cursor, str(at))
    expected = whole.passes[at.pass_index][at.batches :]
    _equal_events(expected, rest, f"resumed at {at}")
    for pass_index in range(at.pass_index + 1, _PASSES):
        cursor = stream.open(_PURPOSE, pass_index, seed=seed)
        events: list[Any] = []
        _drain(cursor, pass_index, events)
        _close(cursor, str(at))
        _equal_events(whole.passes[pass_index], events, f"resumed at {at}, then pass {pass_index}")


class _Drawn(NamedTuple):
    """Batch of a pass, with the position after it."""

    samples: dict[str, list[Any]]
    """Samples, made comparable, in each part of the batch."""
    weight: float
    position: Any
    place: Any
    """What all ranks have of the position, made comparable."""


def _check_shares(make_stream: Callable[[], Stream], size: int, seed: int) -> None:
    shares = [Share(rank, size, "pad") for rank in range(size)]
    try:
        for share in shares:
            as_stream(make_stream()).split(share)
    except DataError:
        return
    whole = _drawn(make_stream, None, seed)
    for start in sorted({0, len(whole) // 2}):
        position = whole[start - 1].position if start else None
        ranks = [_drawn(make_stream, share, seed, position) for share in shares]
        _check_parts(whole[start:], ranks, f"{size} ranks, opened after {start} batches")


def _check_parts(whole: list[_Drawn], ranks: list[list[_Drawn]], where: str) -> None:
    counts = [len(drawn) for drawn in ranks]
    assert set(counts) == {len(whole)}, f"{where}: {counts} batches came instead of {len(whole)} each"
    for index, (batch, *parts) in enumerate(zip(whole, *ranks, strict=True)):
        here = f"{where}: batch {index} from there"
        together: dict[str, list[Any]] = {name: [] for name in batch.samples}
        for rank, part in enumerate(parts):
            assert part.place == batch.place, f"{here}: rank {rank} has a position of its own"
            _add(together, part, here)
        assert together == batch.samples, f"{here}: the parts of the ranks are not the batch"
        for part in parts:
            _check_weight(part, batch, len(ranks), here)


def _add(together: dict[str, list[Any]], part: _Drawn, where: str) -> None:
    assert part.samples.keys() == together.keys(), f"{where}: a rank's batch has other parts"
    for name, samples in part.samples.items():
        together[name] += samples if part.weight else []


def _check_weight(part: _Drawn, batch: _Drawn, size: int, where: str) -> None:
    for name, samples in part.samples.items():
        right = len(samples) * size / len(batch.samples[name])
        assert part.weight == 0 or math.isclose(part.weight, right), (
            f"{where}: the weight is {part.weight}, {right} would make the mean over ranks the mean"
        )


def _drawn(
    make_stream: Callable[[], Stream], share: Share | None, seed: int, position: Any = None
) -> list[_Drawn]:
    _seed_globals(seed)
    stream = as_stream(make_stream())
    stream = stream if share is None else stream.split(share)
    with closing(stream.open(_PURPOSE, 0, position, seed=seed)) as cursor:
        return [_noted(stream, cursor, batch) for batch in cursor]


def _noted(stream: Stream, cursor: Cursor, batch: Any) -> _Drawn:
    position = place = cursor.position()
    if stream.rank_keys:
        place = {key: value for key, value in position.items() if key not in stream.rank_keys}
    return _Drawn(dict(_samples(batch)), cursor.weight, position, fingerprint(place))


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


def _close(cursor: Cursor, where: str) -> None:
    cursor.close()
    cursor.close()
    threads = [thread.name for thread in threading.enumerate() if "everstep" in thread.name]
    assert not threads, f"{where}: threads {threads} are alive after close()"
    children = multiprocessing.active_children()
    assert not children, f"{where}: processes {children} are alive after close()"


def _equal(left: _Trace, right: _Trace, law: str) -> None:
    for pass_index, (one, other) in enumerate(zip(left.passes, right.passes, strict=True)):
        _equal_events(one, other, f"pass {pass_index}: {law}")


def _equal_events(expected: list[Any], got: list[Any], where: str) -> None:
    assert len(got) == len(expected), f"{where}: {len(got)} batches came instead of {len(expected)}"
    for index, (left, right) in enumerate(zip(expected, got, strict=True)):
        assert left[0] == right[0], f"{where}: batch {index} from there differs"
        assert left[1] == right[1], f"{where}: the global random state after batch {index} from there differs"


def fingerprint(tree: Any) -> Any:
    """Make a value comparable; objects of unknown types are compared by their repr."""
    return comparable(tree, lambda value: (type(value).__name__, repr(value)))


_END = object()


# The three global generators; torch's only if the program has imported torch.


def _seed_globals(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


def _get_globals() -> Any:
    torch = sys.modules.get("torch")
    return random.getstate(), np.random.get_state(legacy=False), torch and torch.get_rng_state()


def _set_globals(state: Any) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    if torch := sys.modules.get("torch"):
        torch.set_rng_state(state[2])


def _draw_globals() -> Any:
    torch = sys.modules.get("torch")
    return random.random(), np.random.rand(), torch and torch.rand(()).item()
