"""Ranks whose program has ended: another one that waits to meet them again would wait for its whole limit.

A rank that calls `trainer.evaluate()` alone, after the training, waits for ranks that have no reason to come.
So each process says at its end, in the group that it was in last, that it has ended.
"""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from typing import NamedTuple

from everstep.contracts.group import KeyValueStore, named
from everstep.errors import DisagreementError, GroupError


class _Last(NamedTuple):
    store: KeyValueStore
    rank: int
    size: int
    process: int


_last: _Last | None = None
"""The group that this process joined last, with its store: it is needed after the group is closed."""


def remember(store: KeyValueStore, rank: int, size: int) -> None:
    """Note the group that this process has joined.

    Args:
        store: the keys of this group alone.
    """
    global _last
    if _last is None:
        atexit.register(_say_so)
    _last = _Last(store, rank, size, os.getpid())


def require_running() -> None:
    """Refuse to wait for a rank that was in the group before, and whose program has ended.

    Raises:
        DisagreementError: names the ranks.
    """
    if _last is None:
        return
    others = [rank for rank in range(_last.size) if rank != _last.rank]
    if ended := [rank for rank in others if _last.store.has([f"ended/{rank}"])]:
        raise DisagreementError(
            f"the program of {named(ended)} has ended, and rank {_last.rank} waits to meet all ranks again; "
            "call train(), evaluate() and the like on all ranks alike, not below a condition that only some "
            "of them meet (if rank == 0: ...)",
            ranks=ended,
        )


def _say_so() -> None:
    if _last is not None and _last.process == os.getpid():  # a forked child has not ended the rank
        with suppress(GroupError):  # the store is gone: so are the others
            _last.store.set(f"ended/{_last.rank}", "")
