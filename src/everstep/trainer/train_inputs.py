"""Stream of the inputs that a task's `next_train_inputs` makes of another stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from everstep.contracts.data import Cursor, Stream
from everstep.data.wrappers import CursorWrapper, StreamWrapper

Fetch = Callable[[Iterator[Any]], Any]


class TrainInputs(StreamWrapper):
    """Stream of the inputs that `fetch` draws from another stream, which keeps the position."""

    def __init__(self, stream: Stream, fetch: Fetch) -> None:
        super().__init__(stream)
        self._fetch = fetch

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        return _Cursor(self.stream.open(purpose, pass_index, position, seed=seed), self._fetch)

    def sample_ids(self, purpose: str, pass_index: int, index: int, *, seed: int) -> None:
        """Return None: the task decides how many batches an input takes."""


class _Cursor(CursorWrapper):
    def __init__(self, cursor: Cursor, fetch: Fetch) -> None:
        super().__init__(cursor)
        self._fetch = fetch

    def __next__(self) -> Any:
        return self._fetch(self.cursor)

    def remaining(self) -> int | None:
        return None  # the task decides how many batches an input takes
