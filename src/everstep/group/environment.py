"""`find_group`: the group that this process is part of, `Single` or a `StoreGroup`."""

from __future__ import annotations

import importlib
import os
from typing import Any

from everstep import backends
from everstep.arguments import number
from everstep.contracts.group import LIMIT, Group
from everstep.errors import ConfigError
from everstep.group.store_group import StoreGroup
from everstep.group.torchrun import end_with_torchrun

_STORE = "everstep.backends.torch.key_value_store"
LIMIT_VARIABLE = "EVERSTEP_GROUP_LIMIT"


class Single(Group):
    """The group of one process: every operation returns at once, without a store, a thread or a copy."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1, store=None)

    def gather(self, value: Any, what: str, limit: float | None = None) -> list[Any]:
        """Return `[value]`."""
        return [value]


def find_group(limit: float | None = None) -> Group:
    """Join the group that this process is part of; all its ranks have to do so.

    A process group that the program has initialised counts first, then the variables of a launcher
    (WORLD_SIZE, RANK, MASTER_ADDR, MASTER_PORT, as torchrun sets them).  With neither, or in a group of one,
    this is a `Single`, and nothing is imported.

    Args:
        limit: seconds to wait for the other ranks, here and in the operations of the group; None: what
            EVERSTEP_GROUP_LIMIT says, else 600.

    Raises:
        ConfigError: a launcher's variable is missing or out of range, or the limit is not positive.
        MissingRankError: ranks did not come within `limit`; names them.
        DisagreementError: the program of a rank that was in the group before has ended; names the rank.
        StoreLostError: the store cannot be reached.
    """
    if not _is_launched() and all(backend.processes() == 1 for backend in backends.active()):
        return Single()
    # torch's is the only store so far; its room is named by a string, since only importlib may load a backend
    limit = _limit() if limit is None else limit
    end_with_torchrun()
    rank, size, store = importlib.import_module(_STORE).connect(limit)
    return StoreGroup(rank, size, store, limit)


def group_size() -> int:
    """Number of processes that train together, as far as this one knows without joining them."""
    known = max((backend.processes() for backend in backends.active()), default=1)
    said = os.environ.get("WORLD_SIZE", "")
    return int(said) if known == 1 and said.isdecimal() else known


def _limit() -> float:
    said = os.environ.get(LIMIT_VARIABLE, str(LIMIT))
    try:
        return float(number(LIMIT_VARIABLE, float(said)))
    except ValueError:  # a ConfigError, too
        raise ConfigError(f"{LIMIT_VARIABLE}={said!r}: give a positive number of seconds") from None


def _is_launched() -> bool:
    return os.environ.get("WORLD_SIZE", "1") != "1"
