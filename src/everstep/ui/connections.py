"""Connections of the page: few, and closed where no request comes.  Anybody on this machine may connect."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE = 5.0
"""Seconds in which the head of a request must come."""

MOST = 64
"""Most connections at once: a process may have only 256 open files, and the journals need some."""

BACKLOG = 96
"""Most connections that are accepted before the next turn of the event loop, which may close some."""


class Connection(H11Protocol):
    """Connection over which requests come within `PATIENCE`.

    It is uvicorn's with h11, whatever is installed: httptools reads heads of any size into memory.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._opened = self.loop.time()
        self._watch()
        self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    @property
    def waits(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        """Wait for the rest of a head; not longer, however slowly its bytes come."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(PATIENCE, self._cut)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _cut(self) -> None:
        self._deadline = None
        if self.waits and not self.transport.is_closing():
            self.transport.close()

    def _make_room(self) -> None:
        """If there are too many, close the oldest over which nothing is asked, or else this one."""
        there = [one for one in self.connections if isinstance(one, Connection)]
        there = [one for one in there if not one.transport.is_closing()]
        if len(there) > MOST:
            waiting = (one for one in there if one.waits)
            min(waiting, key=lambda one: one._opened, default=self).transport.abort()


def tell_faults_once(loop: asyncio.AbstractEventLoop) -> None:
    """Print each fault of the event loop once: a lack of open files comes back at each turn."""
    told: set[str] = set()

    def heard(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        message = str(context["message"])
        if message not in told:
            told.add(message)
            print(f"everstep ui: {message}: {context.get('exception')}", file=sys.stderr, flush=True)

    loop.set_exception_handler(heard)
