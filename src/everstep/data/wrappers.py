"""Streams and cursors around other objects, whose members they forward."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, TypeVar

from everstep.contracts.data import Cursor, Share, Stream

_Kind = TypeVar("_Kind", bound=type)
_MISSING = object()


def forwarding_to(attribute: str) -> Callable[[_Kind], _Kind]:
    """Forward a base's public members to the object in `attribute`; a class decorator.

    Members that the class defines stay.  Members that the other object lacks have the base's default.
    """

    def add(kind: _Kind) -> _Kind:
        for name, member in vars(kind.__base__).items():
            own = name in vars(kind) or name.startswith("_")
            if not own and not getattr(member, "__isabstractmethod__", False):
                setattr(kind, name, _forwarded(kind, attribute, name))
        return kind

    return add


def _forwarded(kind: type, attribute: str, name: str) -> property:
    def get(self: Any) -> Any:
        found = getattr(getattr(self, attribute), name, _MISSING)
        return getattr(super(kind, self), name) if found is _MISSING else found

    def put(self: Any, value: Any) -> None:
        setattr(getattr(self, attribute), name, value)

    return property(get, put)


@forwarding_to("stream")
class StreamWrapper(Stream):
    """Stream around another stream, which supplies `generators`, `keeps_place` and the like."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    kind = Stream.kind  # not forwarded: the wrapper is part of what the run reads

    def split(self, share: Share) -> Stream:
        part = copy(self)
        part.stream = self.stream.split(share)
        return part


@forwarding_to("cursor")
class CursorWrapper(Cursor):
    """Cursor around another cursor, which knows the position."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.left_out: list[int] = []
        """Numbers of the batches that this cursor itself has passed over since they were asked for."""

    def position(self) -> Any:
        return self.cursor.position()

    def passed_over(self) -> list[int]:
        found, self.left_out = sorted([*self.cursor.passed_over(), *self.left_out]), []
        return found
