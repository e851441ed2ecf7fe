"""Whereabouts: a rank that waits finds out that another one has gone past the place of their meeting."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from everstep.contracts.group import KeyValueStore
from everstep.errors import DisagreementError

if TYPE_CHECKING:
    from everstep.group.store_group import StoreGroup

PATIENCE = 1.0
"""Seconds that a rank waits before it asks where the others are."""
AGAIN = 10.0
"""Seconds until it asks again: each question wakes a thread of every rank."""


class Whereabouts:
    """Asks where the others are, while this rank waits in an operation, and answers them.

    A rank that passes a meeting may be in a collective with the rank that waits there: neither moves, and
    the limits of both are long.  So the thread that waits for this rank's bell tells the position of its main
    thread, as long as that has not come to the operation in question.  Positions never fall in a program that
    is the same on all ranks, so a rank with a greater one does not come any more.

    Keys: `where/N` (somebody waits in operation N), `at/R` ([N, position] of rank R, which has not come to N;
    never deleted, as another rank may be about to read it).

    Args:
        group: the group.
        position: tells the place of this process's main thread: twice the number of completed steps, and one
            more inside a step; called in a thread, too.
    """

    def __init__(self, group: StoreGroup, position: Callable[[], int]) -> None:
        self._group, self._position = group, position
        self._count = 0
        """Number of the operation in which this rank waits, or has waited last."""
        self._ask_at = 0.0

    def look(self, count: int, what: str) -> None:
        """Look for a rank that has gone past operation `count`; called from time to time while waiting."""
        store, now = self._group.store, time.monotonic()
        if self._count != count:
            self._count, self._ask_at = count, now + PATIENCE
        if now >= self._ask_at:
            self._ask_at = now + AGAIN
            store.set(f"where/{count}", "")
            store.set_all(self._group.bells, "")
            return
        for rank in range(self._group.size):
            if rank != self._group.rank and store.has([f"at/{rank}"]):
                asked, position = json.loads(*store.get([f"at/{rank}"]))
                if asked == count:
                    self._require_not_past(position, rank, what)

    def answer(self, store: KeyValueStore) -> None:
        """Tell where this rank's main thread is, if somebody waits for it; called in a thread."""
        count = self._group.count
        if not store.has([f"where/{count + 1}"]):
            return
        position = self._position()
        if self._group.count != count:
            return  # it has come meanwhile, or was here all the time
        store.set(f"at/{self._group.rank}", json.dumps([count + 1, position]))

    def forget(self, count: int) -> None:
        """Delete the question of operation `count`, if this rank has asked it."""
        if count == self._count:
            self._group.store.delete(f"where/{count}")

    def _require_not_past(self, position: int, rank: int, what: str) -> None:
        if position <= self._position():
            return
        raise DisagreementError(
            f"rank {rank} is {place_of(position)}, past {what!r}, where rank {self._group.rank} waits for "
            "it; call the loop's methods on all ranks alike, not below a condition that only some of them "
            "meet (if rank == 0: ..., or a loss of one rank)",
            ranks=[rank],
        )


def place_of(position: int) -> str:
    """Format a position for a message."""
    step, inside = divmod(position, 2)
    return f"inside step {step + 1}" if inside else f"after step {step}"
