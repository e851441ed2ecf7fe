"""Batches that a rollback has quarantined are drawn, and not handed out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from everstep.contracts import Cursor
from everstep.data.wrapping import CursorAround
from everstep.errors import ConfigError


class Sieve(CursorAround):
    """A cursor that knows the place of each batch in its pass, and passes over some.

    Args:
        what: the stream, in words.
        cursor: what to draw from.
        fresh: whether it stands at the start of its pass.
        quarantined: indices of batches that are not handed out.
        drew: called with the index of each batch that is.

    Attributes:
        skipped: how many were passed over.
    """

    def __init__(
        self,
        what: str,
        cursor: Cursor,
        fresh: bool,
        quarantined: Collection[int],
        drew: Callable[[int], None],
    ) -> None:
        if not (fresh or hasattr(cursor, "done")):
            raise ConfigError(
                f"{what}: a {type(cursor).__name__} at a position does not tell how many batches lie before "
                "it, so none can be quarantined; give it the attribute done, or leave out Recovery"
            )
        super().__init__(cursor)
        self._quarantined, self._drew = quarantined, drew
        self._count = self.skipped = 0

    def __next__(self) -> Any:
        while (index := self._index) in self._quarantined:
            next(self.cursor)
            self._count += 1
            self.skipped += 1
        batch = next(self.cursor)
        self._count += 1
        self._drew(index)
        return batch

    @property
    def _index(self) -> int:
        """Of the batch that comes next."""
        done: int = getattr(self.cursor, "done", self._count)
        return done

    def remaining(self) -> int | None:
        left, index = self.cursor.remaining(), self._index
        return (
            None if left is None else left - sum(index <= each < index + left for each in self._quarantined)
        )
