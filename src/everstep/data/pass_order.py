"""Order of a pass that a user's own sampler chooses, and what such a sampler keeps from pass to pass.

To run the sampler again would give another order, where it draws as it goes, reads what the training changes,
or shuffles a list of its own.  So its whole pass is drawn where the pass begins, and the order is a part of
the position.
"""

from __future__ import annotations

import copy
import itertools
import operator
import pickle
import types
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import xxhash

from everstep.data.adapt import is_stateful, length_of
from everstep.errors import StateError
from everstep.state import digest, encode

_MOST = 1 << 22
"""Entries (batches, or single samples) of a pass above which it is not drawn at its start."""
_MOST_UNKNOWN = 1 << 16
"""Samples above which the pass of a sampler without a length is not: it may have no end."""
_MOST_BYTES = 1 << 26
"""Size of an attribute above which only another object counts as a change."""
_read = dict[int, weakref.ref[Any]]()
"""Samplers that a run of this process has read, by identity."""
_LIBRARIES = {"builtins", "abc", "typing", "torch", "torchdata", "numpy"}


def is_known(sampler: Any) -> bool:
    """Whether a pass may be drawn at its start: the sampler says no length, or one that is not too large."""
    return (length_of(sampler) or 0) <= _MOST


class PassOrder:
    """Sampler of one pass, in place of the user's, whose other attributes it has.

    A sampler that yields more than its length, or than `_MOST_UNKNOWN` without one, is read as it goes; a
    warning names it.

    Attributes:
        entries: what the sampler yields in the pass; None until it is drawn.
        first: number of the entry with which the next iteration begins.
    """

    def __init__(
        self, sampler: Any, in_batches: bool, kept: SamplerStates, entries: list[Any] | None = None
    ) -> None:
        self._sampler, self._in_batches, self._kept = sampler, in_batches, kept
        self.entries, self.first = entries, 0
        self._packed: Any = None

    def __iter__(self) -> Iterator[Any]:
        if self.entries is None:
            length = length_of(self._sampler)
            most, drawn, count = _MOST_UNKNOWN if length is None else length, list[Any](), 0
            with self._kept.noting_changes():
                source = iter(self._sampler)
                for entry in source:
                    drawn.append(plain_index([*entry] if self._in_batches else entry))
                    count += len(drawn[-1]) if self._in_batches and length is None else 1
                    if count > most:
                        break
                else:
                    self.entries = drawn
            if self.entries is None:
                self._kept.warn_of_rest(most)
                yield from itertools.chain(drawn, source)
                return
        yield from self.entries[self.first :]

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        # torchdata would take a state_dict for one that tells the place in the pass
        if name.startswith("_") or name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def packed(self) -> Any:
        """Return the order as a tree that a checkpoint can hold; None if there is none, or it cannot."""
        if self._packed is None and self.entries is not None:
            self._packed = _packed(self.entries)
        return self._packed


def plain_index(entry: Any) -> Any:
    """Copy what a sampler yields: it may yield the same list again with other contents."""
    return [_number(index) for index in entry] if type(entry) is list else _number(copy.copy(entry))


def can_be_saved(tree: Any) -> bool:
    try:
        encode(tree)
    except StateError:
        return False
    return True


def _number(index: Any) -> Any:
    return operator.index(index) if getattr(index, "ndim", None) == 0 else index


def _packed(entries: list[Any]) -> Any:
    batches = [entry if type(entry) is list else [entry] for entry in entries]
    indices = [*itertools.chain.from_iterable(batches)]
    plain = {*map(type, indices)} <= {int} and len({type(entry) is list for entry in entries}) < 2
    if plain and max(map(abs, indices), default=0) < 1 << 62:
        sizes = np.array([*map(len, batches)]) if entries and type(entries[0]) is list else None
        return {"indices": np.array(indices, np.int64), "sizes": sizes}
    return {"entries": entries} if can_be_saved(entries) else None


def unpacked(tree: Any) -> list[Any] | None:
    if tree is None or "entries" in tree:
        return None if tree is None else tree["entries"]
    indices = iter(tree["indices"].tolist())
    if tree["sizes"] is None:
        return [*indices]
    return [[*itertools.islice(indices, size)] for size in tree["sizes"].tolist()]


class _Hash:
    """File for a pickle, of which it keeps the digest; an object that is too large ends the pickling."""

    def __init__(self) -> None:
        self.digest, self._room = xxhash.xxh3_128(), _MOST_BYTES

    def write(self, data: Any) -> int:
        self._room -= memoryview(data).nbytes
        if self._room < 0:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        self.digest.update(data)
        return memoryview(data).nbytes


class _Pickler(pickle.Pickler):
    """Pickles large arrays by their identity: they are data, which a sampler reads and does not change."""

    def reducer_override(self, value: Any) -> Any:
        size = getattr(value, "nbytes", 0)
        if isinstance(size, int) and size > _MOST_BYTES:
            return str, (f"{type(value)} at {id(value)}",)
        if isinstance(value, types.GeneratorType) and value.gi_frame is None:
            return str, ("at its end",)
        return NotImplemented


def _mark(value: Any) -> str | None:
    """Return what changes with a value; None if nobody can tell, as of a generator function's iterator."""
    file = _Hash()
    try:
        _Pickler(file).dump(value)
    except ValueError:
        return f"at {id(value)}"
    except Exception:  # whatever the object's own code raises: it cannot be pickled
        return None if isinstance(value, Iterator) else f"at {id(value)}"
    return file.digest.hexdigest()


def _attributes(sampler: Any) -> dict[str, Any]:
    """Map the attributes of a sampler, and of its class and the user's classes above it, to their values."""
    own = [kind for kind in type(sampler).__mro__ if kind.__module__.partition(".")[0] not in _LIBRARIES]
    of_class = {
        f"{kind.__name__}.{name}": value
        for kind in own
        for name, value in vars(kind).items()
        if not name.startswith("__") and not callable(value) and not hasattr(value, "__get__")
    }
    return {**getattr(sampler, "__dict__", {}), **of_class}


def _digests(sampler: Any, marks: Mapping[str, str | None]) -> dict[str, str]:
    """Digest the attributes that a checkpoint can hold, but for large ones, which are marked by identity."""
    own = getattr(sampler, "__dict__", {})
    known = [name for name, mark in marks.items() if name in own and mark and not mark.startswith("at ")]
    return {name: digest(encode(own[name])) for name in known if can_be_saved(own[name])}


class SamplerStates:
    """What a user's own samplers keep from pass to pass.

    That is the attributes which drawing a pass changes, or training (weights that follow the losses); of
    these, what no checkpoint can hold is left to the sampler's `state_dict`, if it has one.

    Args:
        samplers: the user's own samplers, by their places in the loader.
        apart: objects that they hold and that are not theirs to keep.
    """

    def __init__(self, samplers: Mapping[str, Any], apart: Collection[Any]) -> None:
        self._samplers, self._apart = samplers, [*apart, *samplers.values()]
        self._changing: dict[str, set[str]] = {place: set() for place in samplers}
        self._declared = set[str]()
        """Places of samplers whose `state_dict` is saved, too."""
        self._named = set[tuple[str, str]]()
        """Places and attributes that were warned about."""
        self._last: dict[str, dict[str, str | None]] = {}
        """Marks when the last pass was drawn, or a checkpoint loaded."""
        self._first: dict[str, dict[str, str]] = {}
        """Digests of what could be saved when the run's first pass was drawn."""
        self._head_began = False
        self.set_by_head: dict[str, list[str]] | None = None
        """Attributes that the lines before the last pass set; None if this start did not watch them."""

    def __bool__(self) -> bool:
        return bool(self._samplers)

    @contextmanager
    def noting_changes(self) -> Iterator[None]:
        """Note which attributes of the samplers the block changes, which draws a pass."""
        changed = self._note_changes()
        if self._head_began:
            self.set_by_head, self._head_began = changed, False
        _read.update({id(s): weakref.ref(s) for s in self._samplers.values() if type(s).__weakrefoffset__})
        yield
        self._note_changes(drawn=True)

    def _note_changes(self, drawn: bool = False) -> dict[str, list[str]]:
        """Note what is not as it was last; `drawn`: in between a pass was drawn, which may also use it up."""
        before, self._last = self._last, self._mark_all()
        changed = dict[str, list[str]]()
        for place, marks in before.items():
            now = self._last[place].items()
            changed[place] = [n for n, mark in now if mark != marks.get(n) or (drawn and mark is None)]
            for name in changed[place]:
                self._note(place, name)
        return changed

    def _mark_all(self) -> dict[str, dict[str, str | None]]:
        now, apart = dict[str, dict[str, str | None]](), {*map(id, self._apart)}
        for place, sampler in self._samplers.items():
            values = _attributes(sampler).items()
            now[place] = {name: _mark(value) for name, value in values if id(value) not in apart}
            if place not in self._first:
                self._first[place] = _digests(sampler, now[place])
        return now

    def _note(self, place: str, name: str) -> None:
        sampler = self._samplers[place]
        if name in self._changing[place] or (place, name) in self._named:
            return
        value = _attributes(sampler)[name]
        if name in getattr(sampler, "__dict__", {}) and can_be_saved(value):
            self._changing[place].add(name)
            return
        if is_stateful(sampler):
            self._declared.add(place)
            return
        self._named.add((place, name))
        warnings.warn(
            f"the sampler {type(sampler).__name__} changes its attribute {name!r} ({type(value).__name__}) "
            "when it draws a pass, or the steps do, and no checkpoint can hold it: a resume gives another "
            "order if a later pass depends on it; give the sampler state_dict() and load_state_dict(), or an "
            "order that follows from the epoch alone, as set_epoch(epoch) makes it",
            RuntimeWarning,
            stacklevel=2,
        )

    def warn_of_rest(self, most: int) -> None:
        """Warn once of samplers that yield more than is drawn at the start of a pass."""
        if ("", "") not in self._named:
            self._named.add(("", ""))
            which = " and ".join(type(sampler).__name__ for sampler in self._samplers.values())
            warnings.warn(
                f"the sampler {which} yields more than {most:,} (its __len__, or samples without one): a "
                "resume there runs it again, and gives another order unless that follows from "
                "set_epoch(epoch) and a generator of its own alone; give it the __len__ of a pass that ends",
                RuntimeWarning,
                stacklevel=2,
            )

    def save(self, *, head_follows: bool = False) -> dict[str, Any]:
        """Copy what samplers keep, by their places; `head_follows`: lines up to the next pass are watched."""
        self._note_changes()
        self._head_began |= head_follows
        return copy.deepcopy(
            {
                place: {
                    "attributes": {name: vars(sampler)[name] for name in sorted(self._changing[place])},
                    "first": dict(self._first[place]),
                    "state": sampler.state_dict() if place in self._declared else None,
                }
                for place, sampler in self._samplers.items()
            }
        )

    def load(self, saved: Mapping[str, Any], by_head: dict[str, list[str]] | None, *, in_pass: bool) -> None:
        """Give the samplers back what they kept; between passes what the program has just set stays."""
        self._mark_all()
        for place, tree in copy.deepcopy(dict(saved)).items():
            sampler, watched = self._samplers[place], (by_head or {}).get(place)
            self._first[place] |= tree.get("first", {})
            if tree["state"] is not None:
                sampler.load_state_dict(tree["state"])
                self._declared.add(place)
            is_read = (read := _read.get(id(sampler))) is not None and read() is sampler
            for name, value in tree["attributes"].items():
                live = vars(sampler).get(name)
                now = digest(encode(live)) if can_be_saved(live) else None
                if watched is not None:
                    is_set = name in watched
                else:  # not watched before the first pass: set if neither as at the start nor as left here
                    is_set = not is_read and now != self._first[place].get(name, now)
                # what is equal stays: the state, which is restored first, may hold the same object
                if now != digest(encode(value)) and (in_pass or not is_set):
                    vars(sampler)[name] = value
            self._changing[place].update(tree["attributes"])
        self._last, self.set_by_head = self._mark_all(), by_head
