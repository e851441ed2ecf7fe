"""Streams and cursors around other objects: what they do not say themselves is the other's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from everstep.contracts.data import Cursor, Stream

_Kind = TypeVar("_Kind", bound=type)
_MISSING = object()


def around(attribute: str) -> Callable[[_Kind], _Kind]:
    """Give a class its base's public members from the object in `attribute`.

    What the class defines itself stays.  What the other object lacks has the base's default.
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


@around("stream")
class StreamAround(Stream):
    """A stream around another, which has the rest: `generators`, `keeps_place` and the like."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    kind = Stream.kind  # what is around the data is part of what the run reads


@around("cursor")
class CursorAround(Cursor):
    """A cursor around another, which has the position."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor

    def position(self) -> Any:
        return self.cursor.position()


@around("given")
class AdaptedStream(Stream):
    """Somebody's object with the methods of a stream, and the defaults of what it does not have."""

    source = Stream.source
    shareable = Stream.shareable

    def __init__(self, given: Any) -> None:
        self.given = given

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        cursor = self.given.open(purpose, pass_index, position, seed=seed)
        return cursor if isinstance(cursor, Cursor) else AdaptedCursor(cursor)

    @property
    def kind(self) -> str:
        return type(self.given).__qualname__

    def __repr__(self) -> str:
        return repr(self.given)


@around("given")
class AdaptedCursor(Cursor):
    """Somebody's object with the methods of a cursor, and the defaults of what it does not have."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def __iter__(self) -> Iterator[Any]:
        return iter(self.given)

    def __next__(self) -> Any:
        return next(self.given)

    def position(self) -> Any:
        return self.given.position()
