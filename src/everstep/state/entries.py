"""Entries of `state=`: each kind of object is saved, checked and restored in its own way."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from operator import getitem
from typing import Any, TypeAlias

from everstep import backends
from everstep.arguments import checked_keywords
from everstep.backends.numpy import GeneratorEntry
from everstep.contracts.state import Declaration, Entry, Mismatch, OwnEntry, StateDictEntry, Stateful
from everstep.errors import ConfigError, StateError
from everstep.state.codec import PLAIN, SAVEABLE, array_paths


class Slot:
    """Holder of a value that is replaced instead of mutated: a number, a tuple, a JAX pytree.

    A value that the program changes in place and never replaces (a deque, a list, a dict, a set, an
    array) is restored in place, so that the program's other names for the value stay right.

    Args:
        value: the value to begin with; any tree that a checkpoint can hold.
    """

    @checked_keywords
    def __init__(self, value: Any = None) -> None:
        self._value = value
        self._replaced = False
        self._assigned: bool | None = None
        """Whether `value` was assigned since the last restore; None if there was no restore."""

    @property
    def value(self) -> Any:
        """The value; assign a new one whenever you like."""
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        # None is not yet a value.  Every number and string counts: Python decides which are one object.
        if self._value is not None and not (value is self._value and _mutable(value)):
            self._replaced = True
        self._value = value
        self._assigned = None if self._assigned is None else True

    def state_dict(self) -> Any:
        """Return the value."""
        return self.value

    def load_state_dict(self, state: Any, /) -> None:
        """Hold the saved value."""
        self.value = state

    def __repr__(self) -> str:
        return f"Slot({self.value!r})"


Merge: TypeAlias = Callable[[list[Any], int, int], Any]
"""Function of the saved states of an entry, a rank and the number of ranks; see `PerRank`."""


class PerRank:
    """Declaration that an entry of `state=` is each rank's own: a replay memory, a counter, an environment.

        state={"model": model, "memory": everstep.PerRank(memory)}
        state={"model": model, "seen": everstep.PerRank(seen, merge=shared_out)}

    Each rank saves its own object, and a resume with as many ranks gives each its own back.  An entry that is
    not declared is *replicated*: equal on all ranks, which is compared at each save, and saved once.

    A resume with another number of ranks calls `merge(states, rank, size)` on each rank, before anything is
    restored, and restores the result.  `states` are copies of what the entry had on each rank of the
    checkpoint, in the order of ranks; the result has the form of one of them.  Each start calls it, so it
    must depend on its arguments alone; random numbers that it draws are the same at each start.

    Args:
        value: the object; the program and the loop use this, never the declaration.
        merge: the function; None: a resume with another number of ranks is an error.
    """

    @checked_keywords
    def __init__(self, value: Any, merge: Merge | None = None) -> None:
        if isinstance(value, PerRank):
            raise ConfigError(f"PerRank({value!r}) declares the object twice: leave out one of them")
        if merge is not None and not callable(merge):
            raise ConfigError(f"merge={merge!r:.60}: give a function merge(states, rank, size)")
        self.value, self.merge = value, merge

    def __repr__(self) -> str:
        return f"PerRank({self.value!r:.60})"


def undeclared(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects of a `state=` mapping, those in `PerRank` and other declarations, too."""
    bare = {name: obj.value if isinstance(obj, PerRank) else obj for name, obj in state.items()}
    return {name: obj.value if isinstance(obj, Declaration) else obj for name, obj in bare.items()}


def _mutable(value: Any) -> bool:
    home = backends.of(value)
    return type(value) in _CONTAINERS if home is None else home.pack(value) is None


_CONTAINERS = PLAIN - {type(None), bool, int, float, complex, str, bytes, tuple, frozenset}
_BARE = PLAIN - {kind for kind in PLAIN if issubclass(kind, (dict, list))}


def make_entry(name: str, obj: Any) -> Entry:
    """Make the entry of an object; StateError for one that cannot be saved or restored in place."""
    try:
        entry = _entry(obj)
    except StateError as error:
        raise StateError(f"state entry {name!r}: {error}") from None
    if entry is not None:
        return entry
    kind = type(obj).__name__
    if type(obj) in PLAIN or backends.of(obj) is not None:
        raise StateError(
            f"state entry {name!r} is a bare {kind} ({obj!r:.60}), which cannot be restored in place: "
            "hold it in Slot(value), or in a dict"
        )
    if isinstance(obj, type):
        raise StateError(f"state entry {name!r} is the class {obj.__name__}: pass an instance of it")
    of_gymnasium = any(cls.__module__.startswith("gymnasium.") for cls in type(obj).__mro__)
    recipe = ", as in docs/recipes/reinforcement_learning.md" if of_gymnasium else ""
    raise StateError(
        f"state entry {name!r} is a {type(obj).__module__}.{kind}, which cannot be saved: give it "
        f"state_dict() and load_state_dict(state){recipe}, or pass what can be saved: {SAVEABLE}"
    )


def _entry(obj: Any) -> Entry | None:
    """Make the entry of an object that can be restored in place; None for other objects."""
    if type(obj) in _BARE or isinstance(obj, type):
        return None
    if isinstance(obj, PerRank):
        raise StateError(
            f"{obj!r} is inside another object, and only an entry as a whole can be a rank's own: give it a "
            'name in state=, as in state={"memory": everstep.PerRank(memory)}'
        )
    if isinstance(obj, OwnEntry):
        return obj.entry()
    for backend in backends.active():
        if (entry := backend.entry(obj)) is not None:
            return entry
    if type(obj) is Slot:
        return SlotEntry(obj)
    if isinstance(obj, Stateful):
        return StatefulEntry(obj)
    if isinstance(obj, random.SystemRandom):
        raise StateError("a random.SystemRandom has no state to save: use random.Random(seed)")
    if isinstance(obj, random.Random):
        return GeneratorEntry(obj)
    return ContainerEntry(obj) if isinstance(obj, (dict, list)) else None


class _AsSavedEntry(Entry):
    """Entry whose saved tree has the object's own arrays."""

    def layouts(self) -> Iterator[tuple[tuple[Any, ...], Any]]:
        tree = self.save()
        yield from ((path, reduce(getitem, path, tree)) for path in array_paths(tree))


class StatefulEntry(_AsSavedEntry, StateDictEntry):
    """Entry of an object that belongs to no framework."""


class SlotEntry(_AsSavedEntry):
    """Entry of a `Slot`: its value, and whether the program has replaced the first value.

    The first value may have other names in the program, so it is restored in place.  A first value that was
    replaced is left alone, because the other names then belong to something else.  A value that the program
    assigns in lines that a resume runs again is restored in place, too.
    """

    def __init__(self, slot: Slot) -> None:
        self.slot = slot

    def save(self) -> Any:
        return {"value": self.slot._value, "replaced": self.slot._replaced}

    def check(self, tree: Any) -> Mismatch:
        fits = isinstance(tree, dict) and tree.keys() == self.save().keys()
        return Mismatch([], [], [] if fits else [f"a {type(tree).__name__} -> a Slot"])

    def load(self, tree: Any) -> None:
        self.check(tree).require_none()
        slot = self.slot
        in_place = slot._assigned or not (tree["replaced"] or slot._replaced)
        slot._value = _restored(slot._value, tree["value"]) if in_place else tree["value"]
        slot._replaced, slot._assigned = tree["replaced"], False


class ContainerEntry(_AsSavedEntry):
    """Entry of a dict or a list; restored in place.

    Values may be plain, arrays, or objects with entries of their own (models, optimizers ...).  Arrays that
    still have the saved shape and dtype are restored in place, and so are sets, deques and byte arrays; other
    values are replaced.  Plain values and arrays may come and go during training; the objects must all exist.
    """

    def __init__(self, container: dict[Any, Any] | list[Any]) -> None:
        self.container = container

    def inner(self) -> Iterator[tuple[Any, Entry]]:
        for key, value in _pairs(self.container):
            if (entry := _object_entry(value)) is not None:
                yield key, entry

    def save(self) -> Any:
        try:
            tree = copy.copy(self.container)
            for key, entry in self.inner():
                tree[key] = entry.save()
        except RecursionError:
            raise StateError("it contains itself, or is nested too deeply: use a flat dict") from None
        return tree

    def check(self, tree: Any) -> Mismatch:
        mismatch = self.expects()(tree)
        if type(tree) is not type(self.container):
            mismatch.reshaped.append(f"a {type(tree).__name__} -> a {type(self.container).__name__}")
        return mismatch

    def expects(self) -> Callable[[Any], Mismatch]:
        kind = type(self.container)
        objects = [(key, type(entry) is ContainerEntry, entry.expects()) for key, entry in self.inner()]

        def check(tree: Any) -> Mismatch:
            mismatch = Mismatch([], [], [])
            saved = dict(_pairs(tree)) if type(tree) is kind else {}
            for key, is_container, expected in objects:
                if key in saved or is_container:
                    for names, more in zip(mismatch, expected(saved.get(key)), strict=True):
                        names.extend(f"{key}/{name}" for name in more)
                else:
                    mismatch.missing.append(str(key))
            return mismatch

        return check

    def load(self, tree: Any) -> None:
        self.check(tree).require_none()
        live = dict(_pairs(self.container))
        restored = [(key, _restored(live.get(key), value)) for key, value in _pairs(tree)]
        self.container.clear()
        if isinstance(self.container, list):
            self.container.extend(value for _, value in restored)
        else:
            for key, value in restored:  # not update(): a Counter would add the values
                self.container[key] = value

    def guarded(self, path: tuple[Any, ...]) -> bool:
        value = self.container.get(path[0]) if isinstance(self.container, dict) else self.container[path[0]]
        entry = _object_entry(value)
        return entry is not None and entry.guarded(path[1:])


def keys_to_drop(entry: Entry, tree: Any) -> list[str]:
    """List the keys that the program's dict or list has and a fitting saved one lacks: loading drops them."""
    return _lacking(entry.container, tree) if isinstance(entry, ContainerEntry) else []


def _lacking(live: Any, saved: Any) -> list[str]:
    if not any(isinstance(live, kind) and isinstance(saved, kind) for kind in (dict, list)):
        return []
    before, now = dict(_pairs(saved)), dict(_pairs(live))
    both = [key for key, value in now.items() if key in before and isinstance(value, dict | list)]
    inside = [f"{key}/{name}" for key in both for name in _lacking(now[key], before[key])]
    return [str(key) for key in now if key not in before] + inside


def _pairs(container: Any) -> Any:
    return container.items() if isinstance(container, dict) else enumerate(container)


def _object_entry(value: Any) -> Entry | None:
    return _entry(value) if backends.of(value) is None else None


def _restored(live: Any, saved: Any) -> Any:
    """Restore `saved` into `live` if that is possible, and return `live`; else return `saved`."""
    is_array = backends.of(live) is not None
    if type(live) is type(saved) and not is_array:
        if isinstance(live, tuple) and len(live) == len(saved):
            return tuple(_restored(*pair) for pair in zip(live, saved, strict=True))
        if isinstance(live, set | bytearray) or (isinstance(live, deque) and live.maxlen == saved.maxlen):
            live.clear()
            (live.update if isinstance(live, set) else live.extend)(saved)
            return live
    try:
        entry = _entry(live)
    except StateError:  # of what no checkpoint holds, such as a read-only array
        return saved
    if entry is None or (is_array and any(entry.check(saved))):
        return saved
    if isinstance(entry, ContainerEntry) and type(live) is not type(saved):
        return saved
    entry.load(saved)
    return live
