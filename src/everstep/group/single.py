"""`Single`: the group of one process."""

from __future__ import annotations

from typing import Any

from everstep.contracts.group import Group


class Single(Group):
    """The group of one process: every operation returns at once, without a store, a thread or a copy."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1, store=None)

    def gather(self, value: Any, what: str, limit: float | None = None) -> list[Any]:
        """Return `[value]`."""
        return [value]
