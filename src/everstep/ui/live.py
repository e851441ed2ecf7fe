"""Live events of the page (server-sent events): which runs changed, and which have new points."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection

import orjson
from starlette.responses import StreamingResponse

from everstep.ui.followed_index import FollowedIndex, News

_BEAT = 15.0
"""Seconds after which a silent connection gets a comment, so that it is not taken for dead."""


class Live:
    """Connections that wait for news; they belong to one event loop."""

    def __init__(self, index: FollowedIndex) -> None:
        self._index = index
        self._waiting: set[_Mailbox] = set()
        self._closed = False

    def answer(self, runs: Collection[str]) -> StreamingResponse:
        """Return an endless answer: `runs` events of all runs, and `points` events of some."""
        return StreamingResponse(
            self._events(frozenset(runs)), headers={"X-Accel-Buffering": "no"}, media_type="text/event-stream"
        )

    def close(self) -> None:
        """End all connections; called in the event loop."""
        self._closed = True
        for mailbox in self._waiting:
            mailbox.filled.set()

    async def _events(self, runs: frozenset[str]) -> AsyncIterator[bytes]:
        mailbox, loop = _Mailbox(runs), asyncio.get_running_loop()
        leave = self._index.subscribe(lambda news: loop.call_soon_threadsafe(mailbox.put, news), runs)
        self._waiting.add(mailbox)
        try:
            yield b"retry: 1000\n\n"
            while not self._closed:
                try:
                    await asyncio.wait_for(mailbox.filled.wait(), _BEAT)
                except TimeoutError:
                    yield b": still here\n\n"
                for event in mailbox.empty():
                    yield event
        finally:
            leave()
            self._waiting.discard(mailbox)


class _Mailbox:
    """News for one connection.  A slow browser gets the newest of each run, and no list that grows."""

    def __init__(self, runs: frozenset[str]) -> None:
        self._runs = runs
        self._changed: dict[str, None] = {}
        self._points: dict[str, int] = {}
        self.filled = asyncio.Event()

    def put(self, news: News) -> None:
        self._changed |= dict.fromkeys(news.changed)
        self._points |= {run: step for run, step in news.points if run in self._runs}
        self.filled.set()

    def empty(self) -> list[bytes]:
        """Return what has come since the last call, as events."""
        changed, points = list(self._changed), self._points
        self._changed, self._points = {}, {}
        self.filled.clear()
        events = [_event("runs", {"changed": changed})] if changed else []
        return events + [_event("points", {"run": run, "step": step}) for run, step in points.items()]


def _event(name: str, data: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))
