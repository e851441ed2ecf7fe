"""Stream of the inputs that a task's `next_train_inputs` makes of another stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from everstep.contracts.data import WHOLE, Cursor, Share, Stream
from everstep.data.wrappers import CursorWrapper, StreamWrapper
from everstep.errors import DataError

Fetch = Callable[[Iterator[Any]], Any]


class TrainInputs(StreamWrapper):
    """Stream of the inputs that `fetch` draws from another stream, which keeps the position."""

    def __init__(self, stream: Stream, fetch: Fetch) -> None:
        super().__init__(stream)
        self._fetch = fetch
        self._share = WHOLE

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        kind = _Cursor if self._share.size == 1 else _PartCursor
        return kind(self.stream.open(purpose, pass_index, position, seed=seed), self._fetch)

    def split(self, share: Share) -> TrainInputs:
        """Return the stream of inputs that `fetch` draws from one rank's part."""
        part = TrainInputs(self.stream.split(share), self._fetch)
        part._share = share
        return part

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


class _PartCursor(_Cursor):
    """Cursor of inputs drawn from a rank's part; several batches have no weight if their parts differ."""

    def __next__(self) -> Any:
        before = self.cursor.done or 0
        inputs = super().__next__()
        drew = (self.cursor.done or 0) - before
        if drew > 1 and self.cursor.weight != 1.0:
            raise DataError(
                f"next_train_inputs drew {drew} batches, and the ranks' parts of the last differ in size, so "
                'the weight of their mean is not known; give uneven="drop", or drop_last=True, with a batch '
                "size of all ranks together that their number divides"
            )
        return inputs
