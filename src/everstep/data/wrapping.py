"""Streams and cursors around others: what they do not say themselves is the other's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from everstep.contracts.data import Cursor, Stream


class StreamAround:
    """A stream around another, which has the rest: `describe`, `generators` and the like."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        if name == "stream":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.stream, name)


class CursorAround:
    """A cursor around another, which has the position."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor

    def __iter__(self) -> Iterator[Any]:
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "cursor":
            raise AttributeError(name)
        return getattr(self.cursor, name)
