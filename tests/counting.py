"""Streams that tell which batches are read from them, or do not tell how many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from everstep.contracts.data import Cursor, Stream
from everstep.data.cursor import CursorWrapper, StreamWrapper


class Counted(StreamWrapper):
    """Calls `see` with each batch that is read."""

    def __init__(self, stream: Stream, see: Callable[[Any], object]) -> None:
        super().__init__(stream)
        self._see = see

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        return _CountedCursor(self.stream.open(purpose, pass_index, position, seed=seed), self._see)


class _CountedCursor(CursorWrapper):
    def __init__(self, cursor: Cursor, see: Callable[[Any], object]) -> None:
        super().__init__(cursor)
        self._see = see

    def __next__(self) -> Any:
        batch = next(self.cursor)
        self._see(batch)
        return batch


class Uncounted(StreamWrapper):
    """A stream whose cursor has a position and no `done`."""

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        return _UncountedCursor(self.stream.open(purpose, pass_index, position, seed=seed))


class _UncountedCursor(CursorWrapper):
    done = None

    def __next__(self) -> Any:
        return next(self.cursor)
