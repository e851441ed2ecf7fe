"""What a task's `next_train_inputs` makes of a stream, as a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from everstep.contracts import Cursor, Stream

Fetch = Callable[[Iterator[Any]], Any]


class Inputs:
    """A stream whose batches are what `fetch` draws from another's, which keeps the position."""

    def __init__(self, stream: Stream, fetch: Fetch) -> None:
        self.stream, self._fetch = stream, fetch

    sample_ids = None
    """How many batches an input takes is the task's."""

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        return _Cursor(self.stream.open(purpose, pass_index, position, seed=seed), self._fetch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)  # describe, generators: those of the data


class _Cursor:
    def __init__(self, cursor: Cursor, fetch: Fetch) -> None:
        self._cursor, self._fetch = cursor, fetch

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._fetch(self._cursor)

    def remaining(self) -> int | None:
        return None  # how many batches it draws at a time is the task's

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)
