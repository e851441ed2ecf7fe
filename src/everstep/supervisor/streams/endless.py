"""Endless batches of a stream, pass after pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from everstep.contracts.services import Clock
from everstep.errors import DataError
from everstep.supervisor.streams.slot import StreamSlot


class Endless:
    """Batches of a stream, pass after pass, for `Supervisor.stream`.

    Args:
        slot: the stream.
        passes: number of passes after which the batches end; None: never.
        may_draw: raises where drawing a batch is an error.
        ended: called once when the passes are used up.
        clock: monotonic seconds.
        handed_out: called with the stream and each batch.
        pass_ended: called with each pass that has given its last batch.
        failed: called with the stream when fetching raised, before the error goes on.
    """

    def __init__(
        self,
        slot: StreamSlot,
        passes: int | None,
        may_draw: Callable[[], None],
        ended: Callable[[], None],
        clock: Clock,
        handed_out: Callable[[StreamSlot, Any], None],
        pass_ended: Callable[[int], None],
        failed: Callable[[StreamSlot], None],
    ) -> None:
        self._slot, self._passes = slot, passes
        self._may_draw, self._ended, self._clock = may_draw, ended, clock
        self._handed_out, self._pass_ended, self._failed = handed_out, pass_ended, failed
        self.drawn = 0
        self.waited = 0.0
        """Seconds waited for batches."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def look_ahead(self) -> None:
        """Call `ended` if the last pass is known to be used up, without drawing from it."""
        if self._passes is None or self._slot.pass_index < self._passes - 1:
            return
        cursor = self._slot.cursor
        if self._slot.pass_index >= self._passes or (cursor is not None and cursor.remaining() == 0):
            self._ended()

    def __next__(self) -> Any:
        self._may_draw()
        began = self._clock()
        ended = 0
        while ended < 2:
            if self._passes is not None and self._slot.pass_index >= self._passes:
                self._ended()
                raise StopIteration
            try:
                batch = next(self._slot.open())
            except StopIteration:
                # an open pass may have no batch left, and a pass of quarantined batches alone is not empty
                ended += not self._slot.skipped
                self._pass_ended(self._slot.pass_index)
                self._slot.end_pass()
                continue
            except Exception:
                self._failed(self._slot)
                raise
            self.drawn += 1
            self.waited += self._clock() - began
            self._handed_out(self._slot, batch)
            return batch
        raise DataError(f"stream {self._slot.name!r} gave no batch in a whole pass; give it data")
