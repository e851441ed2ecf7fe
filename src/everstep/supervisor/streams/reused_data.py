"""State of data as the program gave it, for a run that resumes in the process that left it.

A new process makes its data anew, so the state of the data (a generator, a place) is as the program made it.
In the process of the earlier start, that state is as the start left it.  A resume needs it as it was
given: the checkpoint at step 0, for one, says "at the start" of data that it does not know yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ref

from everstep.contracts.data import Stream
from everstep.contracts.state import Entry
from everstep.state import Encoded, decode, digest, encode, isolated, make_entry


@dataclass
class _Read:
    """An object that a run has read: its state at first, and as the last run left it (None: not left yet)."""

    get: Callable[[], Any]
    given: Encoded
    left: Encoded | None = None

    def is_left(self, entry: Entry) -> bool:
        """Whether the object is as the last run left it, or is not left yet."""
        return self.left is None or digest(self.left) == digest(_state(entry))


_read: dict[int, _Read] = {}
"""By the id of the object; an object without weak references (a generator of NumPy's) stays alive here."""


def enter(stream: Stream) -> None:
    """Note the state of a stream that a run begins to read, unless the last run has left it like this."""
    for obj, entry in _keepers(stream):
        read = _read.get(id(obj))
        if read is None or not read.is_left(entry):
            _read[id(obj)] = _Read(_reference(obj), _state(entry))
        else:
            read.left = None


def leave(stream: Stream) -> None:
    """Note the state of a stream that a run has read, when the run leaves it."""
    for obj, entry in _keepers(stream):
        if (read := _read.get(id(obj))) is not None:
            read.left = _state(entry)


def restore() -> None:
    """Give back the first state of data that was left in this process, and not touched since."""
    for read in list(_read.values()):
        if read.left is not None and (obj := read.get()) is not None:
            entry = make_entry("data", obj)
            if read.is_left(entry):
                entry.load(decode(read.given))
                read.left = _state(entry)


def _reference(obj: Any) -> Callable[[], Any]:
    key = id(obj)
    try:
        return ref(obj, lambda gone: _read.pop(key, None))
    except TypeError:
        return lambda: obj


def _keepers(stream: Stream) -> Iterator[tuple[Any, Entry]]:
    """The stream's generators, and data that keeps its own place."""
    yield from ((obj, make_entry("data", obj)) for obj in [*stream.generators, *stream.holds_state])


def _state(entry: Entry) -> Encoded:
    with isolated():
        return encode(entry.save())
