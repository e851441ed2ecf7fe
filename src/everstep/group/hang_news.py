"""News of a hang: the rank that notices it tells the others, so that all write their stacks."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Protocol

from everstep.contracts.group import Group, KeyValueStore
from everstep.errors import GroupError
from everstep.polling import wait_until

WAIT = 5.0
"""Seconds in which the other ranks write their stacks, before the one that noticed the hang ends itself."""


class HangNews(Protocol):
    """What ranks tell each other about a hang; called in one thread.  A lost store tells nothing."""

    def tell(self, what: str) -> None:
        """Tell the other ranks that this one hangs."""

    def told(self) -> str | None:
        """Return what another rank has told, as "rank 1: WHAT"; None: nothing."""

    def written(self) -> None:
        """Tell that this rank has written its stacks."""

    def await_all(self) -> None:
        """Wait, for up to `WAIT` seconds, until all ranks have written their stacks."""

    def over(self) -> None:
        """Take back what this rank has told."""


class NoNews:
    """The news of one process."""

    def tell(self, what: str) -> None: ...

    def told(self) -> str | None: ...

    def written(self) -> None: ...

    def await_all(self) -> None: ...

    def over(self) -> None: ...


class GroupNews:
    """News by the group's store.

    Keys: "hang" is [rank, what] of the rank that told last, "stacks/R" says that rank R has written.
    Only a rank that stands still itself asks for news: steps cost no request.
    """

    def __init__(self, group: Group) -> None:
        assert group.store is not None
        self._rank, self._all = group.rank, [f"stacks/{rank}" for rank in range(group.size)]
        self._store: KeyValueStore = group.store
        self._told = False

    def tell(self, what: str) -> None:
        """Tell the other ranks that this one hangs."""
        with suppress(GroupError):
            self._store.set("hang", json.dumps([self._rank, what]))
            self._told = True

    def told(self) -> str | None:
        """Return what another rank has told, as "rank 1: WHAT"; None: nothing."""
        with suppress(GroupError):
            if self._store.has(["hang"]):
                rank, what = json.loads(*self._store.get(["hang"]))
                return None if rank == self._rank or not what else f"rank {rank}: {what}"
        return None

    def written(self) -> None:
        """Tell that this rank has written its stacks."""
        with suppress(GroupError):
            self._store.set(self._all[self._rank], "")

    def await_all(self) -> None:
        """Wait, for up to `WAIT` seconds, until all ranks have written their stacks."""
        with suppress(GroupError):
            wait_until(lambda: self._store.has(self._all), WAIT)

    def over(self) -> None:
        """Take back what this rank has told."""
        with suppress(GroupError):
            self._store.delete(self._all[self._rank])
            if self._told:
                # not deleted: another rank may be about to read it
                self._store.set("hang", json.dumps([self._rank, ""]))
                self._told = False
