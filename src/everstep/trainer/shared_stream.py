"""Stream that several runs share: each batch is read once for all of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from everstep.contracts.data import Cursor, Share, Stream
from everstep.data.adapt import describe
from everstep.data.wrappers import StreamWrapper
from everstep.errors import DataError


class SharedStream:
    """A stream that several runs read through taps of their own, each batch once.

    A tap apart from the others, as after a resume from another step, reads alone until it has reached the
    others.

    Args:
        stream: everstep's own or a user's: which batches come must follow from the seed, the pass and the
            position alone.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._passes: dict[tuple[str, int], _Pass] = {}

    def reading(self, purpose: str, pass_index: int, position: Any, seed: int) -> _Pass:
        """Return the reading of a pass; open it at `position` if there is none."""
        key = (purpose, pass_index)
        if key not in self._passes:
            # the pass before stays open: a run may still stand at its end
            for old in [each for each in self._passes if each[1] < pass_index - 1]:
                self._passes.pop(old).close()
            self._passes[key] = _Pass(self.stream, purpose, pass_index, position, seed)
        return self._passes[key]

    def close(self) -> None:
        """Close all readings."""
        for each in self._passes.values():
            each.close()
        self._passes.clear()


class _Batch(NamedTuple):
    """A batch, with the positions before and after it, the number of batches left, and those passed over."""

    before: Any
    batch: Any
    after: Any
    left: int | None
    done: int | None
    passed_over: list[int]


class _Pass:
    """A pass that is read once: its cursor, and the batch that was read last."""

    def __init__(self, stream: Stream, purpose: str, pass_index: int, position: Any, seed: int) -> None:
        self.cursor = stream.open(purpose, pass_index, position, seed=seed)
        self._last: _Batch | None = None
        self.head = position

    def left(self, position: Any) -> int | None:
        """Number of batches left after a position that this reading has; None if unknown."""
        left = self.cursor.remaining()
        if self._last is not None and position == self._last.before and left is not None:
            return left + 1
        return left

    def has(self, position: Any) -> bool:
        """Whether the batch after a position is the one read last, or the next to read."""
        return position == self.head or (self._last is not None and position == self._last.before)

    def after(self, position: Any) -> _Batch:
        """The batch that follows a position.

        Raises:
            StopIteration: the pass ends there.
        """
        if self._last is not None and position == self._last.before:
            return self._last
        cursor = self.cursor
        batch = next(cursor)
        place = cursor.position(), cursor.remaining(), cursor.done, cursor.passed_over()
        self._last = _Batch(position, batch, *place)
        self.head = self._last.after
        return self._last

    def close(self) -> None:
        self.cursor.close()


class Tap(StreamWrapper):
    """The shared stream, as one run reads it."""

    def __init__(self, shared: SharedStream) -> None:
        super().__init__(shared.stream)
        self._shared = shared
        self.place = (0, 0)
        """Pass, and number of batches taken from it: how far this run has come."""

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        return _TapCursor(self, self._shared, purpose, pass_index, position, seed)

    def split(self, share: Share) -> Stream:
        """Return the stream on one rank; refused on several, where each run would need a part of its own.

        Raises:
            DataError: there are several ranks.
        """
        if share.size == 1:
            return self
        raise DataError(
            f"{self.stream!r} is read once for several models, and such a stream cannot be split among "
            f"{share.size} ranks; train each model by a Trainer of its own"
        )

    def describe(self, seed: int) -> dict[str, Any]:
        """Describe the shared stream, which the run would read itself if it were alone."""
        return describe(self.stream, seed)


class _TapCursor(Cursor):
    """A run's pass over a shared stream."""

    def __init__(
        self, tap: Tap, shared: SharedStream, purpose: str, pass_index: int, position: Any, seed: int
    ) -> None:
        self._tap, self._shared = tap, shared
        self._pass = (purpose, pass_index)
        self._seed = seed
        self._at = position
        self._alone: Cursor | None = None
        self._opened = opened = self._reading().cursor if position is None else self._read_alone()
        self._taken = 0 if position is None else opened.done or 0
        self._passed_over: list[int] = []
        self._count(opened.done is not None)

    def __next__(self) -> Any:
        if self.ended:
            raise StopIteration
        try:
            batch = self._next()
        except StopIteration:
            self.ended = True
            self.close()
            raise
        self._count(self.done is not None)
        return batch

    def _count(self, counted: bool) -> None:
        self.done = self._taken if counted else None
        self._tap.place = (self._pass[1], self._taken)

    def _next(self) -> Any:
        reading = self._reading()
        if reading.has(self._at):
            self.close()
            found = reading.after(self._at)
            self._at = found.after
            self._took(found.done, found.passed_over)
            return copied(found.batch)  # a copy: the step of one run may change its batch in place
        alone = self._read_alone()
        batch = next(alone)
        self._at = alone.position()
        self._took(alone.done, alone.passed_over())
        return batch

    def _took(self, done: int | None, passed_over: list[int]) -> None:
        """Count a batch, and those that were passed over before it."""
        self._taken = self._taken + 1 if done is None else done
        self._passed_over += passed_over

    def sample_numbers(self, first: int, end: int) -> Sequence[Any] | None:
        return self._opened.sample_numbers(first, end)

    def passed_over(self) -> list[int]:
        found, self._passed_over = self._passed_over, []
        return found

    def _read_alone(self) -> Cursor:
        if self._alone is None:
            self._alone = self._shared.stream.open(*self._pass, self._at, seed=self._seed)
        return self._alone

    def _reading(self) -> _Pass:
        purpose, pass_index = self._pass
        return self._shared.reading(purpose, pass_index, self._at, self._seed)

    def position(self) -> Any:
        return self._at

    def remaining(self) -> int | None:
        if self.ended:
            return 0
        reading = self._reading()
        return reading.left(self._at) if reading.has(self._at) else self._read_alone().remaining()

    def close(self) -> None:
        if self._alone is not None:
            self._alone.close()
            self._alone = None


def copied(batch: Any) -> Any:
    """Copy a batch into memory of its own; arrays keep their strides, because bits can depend on them."""
    kind = type(batch)
    if kind is np.ndarray and not batch.dtype.hasobject:
        return _array(batch)
    if kind in (tuple, list):
        return kind(map(copied, batch))
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return kind._make(map(copied, batch))
    if kind is dict:
        return {name: copied(part) for name, part in batch.items()}
    return copy.deepcopy(batch)


def _array(array: NDArray[Any]) -> NDArray[Any]:
    if not array.size:
        return array.copy()
    spans = [(count - 1) * stride for count, stride in zip(array.shape, array.strides, strict=True)]
    begin = -sum(span for span in spans if span < 0)
    memory = np.empty(begin + sum(span for span in spans if span > 0) + array.itemsize, np.uint8)
    made: NDArray[Any] = np.ndarray(array.shape, array.dtype, memory, begin, array.strides)
    np.copyto(made, array)
    return made
