"""What the program gave to data that keeps state: for a run that goes on in the process that left it.

A new process makes its data anew, and what the data keeps (a generator, a place) stands where the program
puts it.  In the process of the start before, it stands where that start left it.  A resume needs it where it
was given: the checkpoint at step 0, for one, says "at the start" of data that it does not know yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from everstep.contracts.data import Stream
from everstep.contracts.state import Entry
from everstep.state import Encoded, decode, digest, encode, isolated, make_entry


@dataclass
class _Kept:
    """An object with state, when a run first read it and when the last one left it (None: it has not)."""

    given: Encoded
    left: Encoded | None = None


class _Registry:
    """By object; those that allow no weak reference (NumPy's generators) stay alive with their entry."""

    def __init__(self) -> None:
        self._weak: WeakKeyDictionary[Any, _Kept] = WeakKeyDictionary()
        self._strong: dict[int, tuple[Any, _Kept]] = {}

    def get(self, obj: Any) -> _Kept | None:
        try:
            return self._weak.get(obj)
        except TypeError:
            found = self._strong.get(id(obj))
            return None if found is None else found[1]

    def put(self, obj: Any, kept: _Kept) -> None:
        try:
            self._weak[obj] = kept
        except TypeError:
            self._strong[id(obj)] = (obj, kept)

    def items(self) -> list[tuple[Any, _Kept]]:
        return [*self._weak.items(), *self._strong.values()]


_registry = _Registry()


def enter(stream: Stream) -> None:
    """A run reads this stream: what it keeps is given, unless the run before has left it like this."""
    for obj, entry in _keepers(stream):
        kept = _registry.get(obj)
        if kept is None or not _is_left(kept, entry):
            _registry.put(obj, _Kept(_state(entry)))
        else:
            kept.left = None


def leave(stream: Stream) -> None:
    """A run reads it no more: what it keeps now is what the run made of it."""
    for obj, entry in _keepers(stream):
        if (kept := _registry.get(obj)) is not None:
            kept.left = _state(entry)


def restore() -> None:
    """A run is resumed: what was left behind in this process, and not touched since, is as it was given."""
    for obj, kept in _registry.items():
        entry = make_entry("data", obj)
        if kept.left is not None and _is_left(kept, entry):
            entry.load(decode(kept.given))
            kept.left = _state(entry)


def _keepers(stream: Stream) -> list[tuple[Any, Entry]]:
    """The stream's generators, and data that keeps its own place."""
    objects = [*stream.generators, *stream.holds_state]
    return [(obj, make_entry("data", obj)) for obj in objects]


def _is_left(kept: _Kept, entry: Entry) -> bool:
    """Whether it is as the last run left it (one that reads it now has not)."""
    return kept.left is None or digest(kept.left) == digest(_state(entry))


def _state(entry: Entry) -> Encoded:
    with isolated():
        return encode(entry.save())
