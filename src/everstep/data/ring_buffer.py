"""Replay memory of fixed capacity, of which a save copies only what was written since the last."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.arguments import checked_keywords, integer
from everstep.contracts.state import Entry, Mismatch, OwnEntry, StateDictEntry
from everstep.errors import ConfigError, DataError, RestoreError, nearest
from everstep.state import stamp, unstamp

CHUNK = 2 << 20
"""Bytes of a chunk, at most, unless a single item is larger."""


class RingBuffer(OwnEntry):
    """Memory of the newest `capacity` items in host memory; an item has a value for each field.

        memory = everstep.data.RingBuffer(100_000, {"image": ("uint8", (84, 84)), "reward": "float32"})
        memory.append(image=image, reward=1.0)
        batch = memory.sample(32, generator)       # {"image": (32, 84, 84), "reward": (32,)}
        memory[0], memory[-1], memory[2:5]         # the oldest, the newest, three in order of age

    An entry of `state=` as it is, on several ranks usually in `everstep.PerRank`.  Values of a field are
    saved in chunks of at most 2 MiB, and a save copies only those chunks that were written to since the last
    save.  All access to the values is by methods, which track that; they return copies.

    Args:
        capacity: number of items, at least 1; after that a new item replaces the oldest.
        fields: name to element type of NumPy, or to (element type, shape of a value).

    Attributes:
        appended: number of items that were ever appended.
    """

    @checked_keywords
    def __init__(self, capacity: int, fields: Mapping[str, Any]) -> None:
        self.capacity = integer("capacity", capacity)
        if not isinstance(fields, Mapping) or not fields:
            raise ConfigError(
                f"RingBuffer() needs fields, got {fields!r:.80}; as in "
                'RingBuffer(1000, {"image": ("uint8", (84, 84)), "reward": "float32"})'
            )
        self.appended = 0
        self._count = 0
        self._fields = {
            name: _Field(name, _zeros(name, self.capacity, kind)) for name, kind in fields.items()
        }

    def __len__(self) -> int:
        return self._count

    @property
    def fields(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name to (element type, shape of a value)."""
        return {name: (str(field.values.dtype), field.shape) for name, field in self._fields.items()}

    def append(self, /, **values: Any) -> None:
        """Append an item: a value for each field; after a DataError (a shape, a kind) nothing is written."""
        self._add({name: array[None] for name, array in self._fitted(values, ()).items()})

    def extend(self, /, **values: Any) -> None:
        """Append n items: for each field an array of shape (n, ...); the last `capacity` of them are kept."""
        self._add(self._fitted(values, None))

    def _add(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        if missing := [name for name in self._fields if name not in arrays]:
            raise DataError(f"the item lacks {', '.join(map(repr, missing))}: give each field a value")
        lengths = {name: len(array) for name, array in arrays.items()}
        n = next(iter(lengths.values()))
        if set(lengths.values()) != {n}:
            raise DataError(f"extend() was given different numbers of items: {lengths}")
        first = max(0, n - self.capacity)
        slots = (self.appended + np.arange(first, n)) % self.capacity
        for name, array in arrays.items():
            self._fields[name].write(slots, array[first:])
        self.appended += n
        self._count = min(self._count + n, self.capacity)

    def update(self, indices: Any, /, **values: Any) -> None:
        """Replace values of some fields, as priorities: for each field an array of shape (len(indices), ...).

        Of an index that is there twice the last value counts.  After an error nothing is written.
        """
        slots, shape = self._slots(indices)
        arrays = self._fitted(values, shape)
        # of equal places the last counts, and NumPy does not promise that
        _, last = np.unique(slots[::-1], return_index=True)
        chosen = len(slots) - 1 - last
        for name, array in arrays.items():
            field = self._fields[name]
            field.write(slots[chosen], array.reshape((len(slots), *field.shape))[chosen])

    def clear(self) -> None:
        self._count = 0

    def _fitted(self, values: Mapping[str, Any], before: tuple[int, ...] | None) -> dict[str, NDArray[Any]]:
        """Return values as arrays of their fields' types; `before` as for `_Field.fitted`."""
        for name in values:
            if name not in self._fields:
                raise DataError(f"the memory has no field {name!r}; {nearest(name, self._fields)}")
        return {name: self._fields[name].fitted(value, before) for name, value in values.items()}

    def __getitem__(self, index: Any) -> dict[str, Any]:
        """Copy items by age: 0 is the oldest, -1 the newest.

        Args:
            index: an integer, a slice, or a list, array or tensor of integers.

        Returns:
            Name to value, with the shape of the index before the shape of a value.
        """
        slots, shape = self._slots(index)
        return {name: f.values[slots].reshape((*shape, *f.shape)) for name, f in self._fields.items()}

    def sample(self, n: int, generator: np.random.Generator | None = None) -> dict[str, Any]:
        """Copy n items drawn at random with replacement, each with the same chance.

        Args:
            generator: NumPy's generator to draw from, an entry of the state of its own; None draws from
                `np.random`, whose state is saved by itself.
        """
        if not self._count:
            raise DataError("sample() from an empty memory: call append() or extend() first")
        draw = np.random.randint if generator is None else generator.integers
        return self[draw(0, self._count, integer("n", n, 0))]

    def _slots(self, index: Any) -> tuple[NDArray[np.int64], tuple[int, ...]]:
        """Return the slots at an index by age, 1-D, and the index's shape."""
        indices = np.arange(*index.indices(self._count)) if isinstance(index, slice) else np.asarray(index)
        if indices.size == 0:
            indices = indices.astype(np.int64)
        if indices.dtype.kind not in "iu":
            raise IndexError(f"an index is an integer, a slice, or an array of integers, not {index!r:.60}")
        outside = (indices < -self._count) | (indices >= self._count)
        if outside.any():
            raise IndexError(f"no item {indices[outside].flat[0]}: the memory has {self._count} items")
        flat = indices.reshape(-1).astype(np.int64)
        oldest = self.appended - self._count
        return (flat % max(self._count, 1) + oldest) % self.capacity, indices.shape

    def state_dict(self) -> dict[str, Any]:
        """Return the state; its arrays are the live ones, to be copied at once, and never written to."""
        used = min(self.appended, self.capacity)
        return {
            "capacity": self.capacity,
            "appended": self.appended,
            "items": self._count,
            "fields": {name: [dtype, list(shape)] for name, (dtype, shape) in self.fields.items()},
            "chunks": {name: field.chunks(used) for name, field in self._fields.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state that `state_dict` returned; refuse one of another capacity or of other fields."""
        self.compare(state).require_none()
        for name, field in self._fields.items():
            field.load(state["chunks"][name], min(self.appended, self.capacity))
        self.appended, self._count = state["appended"], state["items"]

    def compare(self, state: Any) -> Mismatch:
        """Find what does not fit in a state: the capacity, fields, their types and shapes."""
        if not isinstance(state, Mapping) or not {"capacity", "fields", "chunks"} <= state.keys():
            return Mismatch([], [], [f"a {type(state).__name__} -> a RingBuffer"])
        own = {name: f"{dtype} {shape}" for name, (dtype, shape) in self.fields.items()}
        saved = {name: f"{dtype} {tuple(shape)}" for name, (dtype, shape) in state["fields"].items()}
        mismatch = Mismatch(
            [f"fields/{name}" for name in own if name not in saved],
            [f"fields/{name}" for name in saved if name not in own],
            [f"fields/{n} {saved[n]} -> {own[n]}" for n in own if saved.get(n, own[n]) != own[n]],
        )
        if state["capacity"] != self.capacity:
            mismatch.reshaped.insert(0, f"capacity {state['capacity']} -> {self.capacity}")
        return mismatch

    def entry(self) -> Entry:
        return _RingEntry(self)

    def __copy__(self) -> RingBuffer:
        # two memories over the same arrays could not know of each other's writes
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name} {dtype} {shape}" for name, (dtype, shape) in self.fields.items())
        return f"RingBuffer({self._count} of {self.capacity} items: {fields})"


class _RingEntry(StateDictEntry):
    def check(self, tree: Any) -> Mismatch:
        mismatch: Mismatch = self.obj.compare(tree)
        return mismatch


def _zeros(name: str, capacity: int, kind: Any) -> NDArray[Any]:
    dtype, shape = kind if isinstance(kind, tuple | list) and len(kind) == 2 else (kind, ())
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    shape = tuple(integer(f"size in the shape of {name!r}", size, 0) for size in shape)
    why = "a field has the name of a variable, and a plain element type"
    try:
        values = np.zeros((capacity, *shape), np.dtype("O" if dtype is None else dtype))
        if not values.dtype.hasobject and values.dtype.itemsize and name.isidentifier():
            return values
    except (MemoryError, ValueError, TypeError) as error:
        why = str(error).splitlines()[0][:200]
    raise ConfigError(
        f"a RingBuffer of {capacity:,} items cannot have the field {name!r} of {kind!r:.80}: {why}; give a "
        'capacity that fits in memory, and a type of NumPy or a pair as ("uint8", (84, 84))'
    )


class _Field:
    """Values of one field, and the chunks in which they are saved.

    Attributes:
        values: shape (capacity, *shape), in the order of slots.
        shape: shape of a value.
    """

    def __init__(self, name: str, values: NDArray[Any]) -> None:
        self._name, self.values = name, values
        self.shape = values.shape[1:]
        fitting = CHUNK // max(values[:1].nbytes, 1)
        self._length = 1 << max(0, fitting.bit_length() - 1)
        # views that are saved: they live as long as the values, as each has its stamp
        self._views = [values[at : at + self._length] for at in range(0, len(values), self._length)]
        for view in self._views:
            view.flags.writeable = False

    def fitted(self, value: Any, before: tuple[int, ...] | None) -> NDArray[Any]:
        """Return values as an array of the field's type; refuse those that it would cut or wrap.

        `before` is the shape before that of a value; None for any number of values.
        """
        dtype = self.values.dtype
        try:
            array = np.asarray(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(f"the field {self._name!r} cannot hold {value!r:.60}: {error}") from None
        expected = (array.shape or (0,))[:1] if before is None else before
        if array.shape != (*expected, *self.shape):
            raise DataError(
                f"the field {self._name!r} takes the shape {(*expected, *self.shape)}, got {array.shape}"
            )
        # floating-point numbers are rounded, as NumPy does; an integer out of range would be another one
        casting: Any = "same_kind" if dtype.kind in "fc" else "safe"
        if array.size == 0 or np.can_cast(array.dtype, dtype, casting):
            return array.astype(dtype, copy=False)
        cast = array.astype(dtype) if array.dtype.kind in "biu" else None
        if cast is None or not np.array_equal(cast, array):
            raise DataError(
                f"the field {self._name!r} is {dtype}, and {array.dtype} {value!r:.60} does not fit: "
                "convert it"
            )
        return cast

    def write(self, slots: NDArray[np.int64], values: Any) -> None:
        for index in set((slots // self._length).tolist()):
            unstamp(self._views[index])
        self.values[slots] = values

    def chunks(self, used: int) -> list[NDArray[Any]]:
        """Return the chunks with the first `used` slots, with stamps; slots that are not used are zeros."""
        views = self._views[: -(-used // self._length)]
        for view in views:
            stamp(view)
        return views

    def load(self, chunks: list[Any], used: int) -> None:
        """Copy saved chunks, of whatever length, over `used` slots."""
        count = sum(map(len, chunks))
        if count > len(self.values):
            raise RestoreError(f"the field {self._name!r} has more items than the capacity")
        at = 0
        for chunk in chunks:
            self.write(np.arange(at, at + len(chunk)), chunk)
            at += len(chunk)
        self.write(np.arange(at, used), 0)

    def __reduce__(self) -> tuple[Any, ...]:
        # a copy and a pickle make views, and thereby stamps, of their own
        return _Field, (self._name, self.values)
