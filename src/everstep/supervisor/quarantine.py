"""Quarantine of batches after a rollback: they are drawn, and not handed out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from everstep.contracts.data import Cursor
from everstep.data.wrappers import CursorWrapper


class Sieve(CursorWrapper):
    """Cursor that knows the place of each batch in its pass, and leaves quarantined batches out.

    Args:
        cursor: the cursor to draw from; tells `done`.
        quarantined: indices of batches that are not handed out.
        drew: called with the index of each batch that is handed out.

    Attributes:
        skipped: number of batches that were left out.
    """

    skipped = 0

    def __init__(
        self,
        cursor: Cursor,
        quarantined: Collection[int],
        drew: Callable[[int], None],
    ) -> None:
        super().__init__(cursor)
        self._quarantined, self._drew = quarantined, drew

    @property
    def _index(self) -> int:
        assert self.cursor.done is not None
        return self.cursor.done

    def __next__(self) -> Any:
        while (index := self._index) in self._quarantined:
            next(self.cursor)
            self.skipped += 1
        batch = next(self.cursor)
        self._drew(index)
        return batch

    def remaining(self) -> int | None:
        left, index = self.cursor.remaining(), self._index
        return (
            None if left is None else left - sum(index <= each < index + left for each in self._quarantined)
        )
