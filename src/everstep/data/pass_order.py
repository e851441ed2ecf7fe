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
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import xxhash

from everstep.data.adapters import is_stateful, length_of
from everstep.errors import StateError
from everstep.state import digest, encode

_MOST = 1 << 22
"""Entries (batches, or single samples) of a pass above which it is not drawn at its start."""


def is_known(sampler: Any) -> bool:
    """Whether a pass can be drawn at its start: the sampler has a length."""
    length = length_of(sampler)
    return length is not None and length <= _MOST


class PassOrder:
    """Sampler of one pass, in place of the user's, whose other attributes it has.

    A sampler that yields more than its length is not drawn at the start, but read as it goes.

    Args:
        in_batches: whether the sampler yields batches of indices, or single indices.
        kept: what the user's samplers keep.

    Attributes:
        entries: what the sampler yields in the pass; None until it is drawn.
        first: number of the entry with which the next iteration begins.
    """

    def __init__(
        self, sampler: Any, in_batches: bool, kept: KeptBySamplers, entries: list[Any] | None = None
    ) -> None:
        self._sampler, self._in_batches, self._kept = sampler, in_batches, kept
        self.entries, self.first = entries, 0
        self._packed: Any = None

    def __iter__(self) -> Iterator[Any]:
        if self.entries is None:
            length = len(self._sampler)
            with self._kept.noting_changes():
                source = iter(self._sampler)
                drawn = [self._plain(entry) for entry in itertools.islice(source, length + 1)]
            if len(drawn) > length:
                yield from itertools.chain(drawn, source)
                return
            self.entries = drawn
        yield from self.entries[self.first :]

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        # torchdata would take a state_dict for one that tells the place in the pass
        if name.startswith("_") or name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def _plain(self, entry: Any) -> Any:
        return plain_index([*entry] if self._in_batches else entry)

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


def _mark_of_other(value: Any) -> Any:
    """Return a digest of an object that can be pickled; else, and of anything like a dataset, the object."""
    if not hasattr(value, "__getitem__"):
        with suppress(Exception):  # whatever the object's own code raises: it cannot be pickled
            return xxhash.xxh3_128_hexdigest(pickle.dumps(value))
    return value


class KeptBySamplers:
    """What a user's own samplers keep from pass to pass.

    That is the attributes which the first pass of a process changes; of these, what no checkpoint can hold is
    left to the sampler's `state_dict`, if it has one.

    Args:
        samplers: the user's own samplers, by their places in the loader.
        apart: objects that they hold and that are not theirs to keep.
    """

    def __init__(self, samplers: Mapping[str, Any], apart: Collection[Any]) -> None:
        self._samplers = samplers
        self._apart = [*apart, *samplers.values()]
        self._changing: dict[str, set[str]] = {place: set() for place in samplers}
        self._declared = set[str]()
        """Places of samplers whose `state_dict` is saved, too."""
        self._noted = False

    def __bool__(self) -> bool:
        return bool(self._samplers)

    @contextmanager
    def noting_changes(self) -> Iterator[None]:
        """Note which attributes of the samplers the block changes, which draws a pass."""
        if self._noted:
            yield
            return
        before = {place: self._marks(sampler) for place, sampler in self._samplers.items()}
        yield
        self._noted = True
        for place, sampler in self._samplers.items():
            for name, (saveable, mark) in self._marks(sampler).items():
                _, was = before[place].get(name, (saveable, None))
                if mark is not was and not (isinstance(mark, str) and mark == was):
                    self._note(place, name, saveable)

    def _marks(self, sampler: Any) -> dict[str, tuple[bool, Any]]:
        """Map attributes to whether a checkpoint can hold them, and to a mark that changes with them."""
        return {
            name: (True, digest(encode(value))) if can_be_saved(value) else (False, _mark_of_other(value))
            for name, value in getattr(sampler, "__dict__", {}).items()
            if not any(value is each for each in self._apart)
        }

    def _note(self, place: str, name: str, saveable: bool) -> None:
        if saveable:
            self._changing[place].add(name)
            return
        if is_stateful(self._samplers[place]):
            self._declared.add(place)
            return
        sampler = self._samplers[place]
        kind, value = type(sampler).__name__, vars(sampler)[name]
        warnings.warn(
            f"the sampler {kind} changes its attribute {name!r} ({type(value).__name__}) in each pass, and "
            "no checkpoint can hold it: a resume gives another order if the next pass depends on it; "
            "give the sampler state_dict() and load_state_dict(), or an order that follows from the epoch "
            "alone, as set_epoch(epoch) makes it",
            RuntimeWarning,
            stacklevel=2,
        )

    def save(self) -> dict[str, Any]:
        """Return what the samplers keep now, by their places, in a copy."""
        return copy.deepcopy(
            {
                place: {
                    "attributes": {name: vars(sampler)[name] for name in sorted(self._changing[place])},
                    "state": sampler.state_dict() if place in self._declared else None,
                }
                for place, sampler in self._samplers.items()
            }
        )

    def load(self, saved: Mapping[str, Any]) -> None:
        for place, tree in copy.deepcopy(dict(saved)).items():
            sampler = self._samplers[place]
            if tree["state"] is not None:
                sampler.load_state_dict(tree["state"])
                self._declared.add(place)
            if tree["attributes"]:  # an array has none
                vars(sampler).update(tree["attributes"])
            self._changing[place].update(tree["attributes"])
