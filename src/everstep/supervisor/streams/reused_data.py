"""State of data as the program gave it, for a run that resumes in the process that left it.

A new process makes its data anew, so the state of the data (a generator, a place) is as the program made it.
In the process of the earlier start, that state is as the start left it.  A resume needs it as it was
given: the checkpoint at step 0, for one, says "at the start" of data that it does not know yet.
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
    """State of an object when a run first read it, and when the last run left it (None: not left yet)."""

    given: Encoded
    left: Encoded | None = None


class _Registry:
    """Registry by object; objects without weak references (NumPy's generators) stay alive in it."""

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
    """Note the state of a stream that a run begins to read, unless the last run has left it like this."""
    for obj, entry in _keepers(stream):
        kept = _registry.get(obj)
        if kept is None or not _is_left(kept, entry):
            _registry.put(obj, _Kept(_state(entry)))
        else:
            kept.left = None


def leave(stream: Stream) -> None:
    """Note the state of a stream that a run has read, when the run leaves it."""
    for obj, entry in _keepers(stream):
        if (kept := _registry.get(obj)) is not None:
            kept.left = _state(entry)


def restore() -> None:
    """Give back the first state of data that was left in this process, and not touched since."""
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
    """Whether an object is as the last run left it, or is not left yet."""
    return kept.left is None or digest(kept.left) == digest(_state(entry))


def _state(entry: Entry) -> Encoded:
    with isolated():
        return encode(entry.save())
