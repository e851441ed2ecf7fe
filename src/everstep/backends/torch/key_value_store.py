"""The key-value store of torch.distributed: torchrun's, that of a process group, or one that rank 0 hosts.

No collective of the process group is used, so gloo, nccl and mpi are alike, and nothing waits for a device.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from everstep.backends.torch.parallel import PAUSE, launched, launched_number
from everstep.errors import ConfigError, StoreLostError

FOREVER = timedelta(days=20)
"""The limit of a wait without a limit: torch takes 0 for none at all, and counts milliseconds in 32 bits."""

ANSWER = 10.0
"""Seconds for a host to accept a connection that was there before; torch asks for twice as long."""

_connections: dict[Any, Any] = {}
"""Connections by address or by the process group's store, kept until this process ends.

Rank 0's may be the server, which other ranks may still ask.
"""


def connect(limit: float) -> tuple[int, int, TorchStore]:
    """Return rank, size, and a connection to the store that all ranks see."""
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        groups: Any = dist.distributed_c10d._get_default_store()
        if groups not in _connections:
            _connections[groups] = _clone(groups, [])  # torch's threads wait in the process group's own
            atexit.register(time.sleep, PAUSE)
        own = _connections[groups]
    else:
        rank, size = launched_number("RANK"), launched_number("WORLD_SIZE")
        if not 0 <= rank < size:
            raise ConfigError(f"RANK={rank} with WORLD_SIZE={size}: set RANK to 0 up to WORLD_SIZE - 1")
        own = _store_at_the_address(rank, limit)
    own.set_timeout(timedelta(seconds=limit))
    # without torchrun's restart count, which is each agent's own: an agent that joins later has another
    prefix = f"everstep/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/"
    return rank, size, TorchStore(PrefixStore(prefix, own))


def _store_at_the_address(rank: int, limit: float) -> Any:
    """Connect as torch's env:// rendezvous does, without its wait for all ranks, which names none of them."""
    host, port = launched("MASTER_ADDR"), launched_number("MASTER_PORT")
    if (host, port) in _connections:
        return _connections[host, port]
    torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    limit = min(limit, ANSWER) if torchruns else limit
    with _lost_if_it_fails([], f"no store answers at {host}:{port} within {limit:g} s"):
        store = TCPStore(
            host,
            port,
            is_master=rank == 0 and not torchruns,
            timeout=timedelta(seconds=limit),
            wait_for_workers=False,
            multi_tenant=True,  # a later init_process_group of this process shares the server
        )
    _connections[host, port] = store
    return store


def _clone(store: Any, gone: list[str]) -> Any:
    limit = store.timeout
    with _lost_if_it_fails(gone):
        store.set_timeout(min(limit, timedelta(seconds=ANSWER)))  # the clone takes it
        made = store.clone()
        store.set_timeout(limit)
        made.set_timeout(limit)
        return made


@contextmanager
def _lost_if_it_fails(
    gone: list[str], what: str = "the store of the processes that train together is gone"
) -> Iterator[None]:
    """Raise a failure of a request as `StoreLostError`; note it in `gone`, and make no request after it."""
    if gone:  # at each request torch would print a stack of C++
        raise StoreLostError(gone[0])
    try:
        yield
    except dist.DistError as error:
        first_line = str(error).partition("\n")[0]  # more are a stack of C++
        gone.append(
            f"{what} ({first_line}); check the process that hosts it (torchrun, or rank 0), then start again"
        )
        raise StoreLostError(gone[0]) from error


class TorchStore:
    """A connection to a store of torch.distributed, as a `KeyValueStore`; torch lets threads take turns."""

    def __init__(self, store: Any, gone: list[str] | None = None) -> None:
        self.store, self._gone = store, [] if gone is None else gone

    def clone(self) -> TorchStore:
        return TorchStore(_clone(self.store, self._gone), self._gone)

    def below(self, prefix: str) -> TorchStore:
        return TorchStore(PrefixStore(prefix, self.store), self._gone)

    def _ask(self, request: str, *arguments: Any) -> Any:
        with _lost_if_it_fails(self._gone):
            return getattr(self.store, request)(*arguments)

    def set(self, key: str, value: str) -> None:
        self._ask("set", key, value)

    def set_all(self, keys: Sequence[str], value: str) -> None:
        self._ask("multi_set", list(keys), [value] * len(keys))

    def has(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", list(keys)))

    def get(self, keys: Sequence[str]) -> list[str]:
        return [value.decode() for value in self._ask("multi_get", list(keys))]

    def set_once(self, key: str, value: str) -> str:
        return str(self._ask("compare_set", key, "", value), "utf-8")

    def delete(self, key: str) -> None:
        self._ask("delete_key", key)

    def block(self, key: str) -> None:
        self._ask("wait", [key], FOREVER)
