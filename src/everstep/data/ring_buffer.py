"""Replay memory of fixed capacity, of which a save copies and writes only what was written since the last."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from everstep import backends
from everstep.arguments import checked_keywords, integer
from everstep.contracts.state import Entry, Mismatch, OwnEntry
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
    save.  All ways to the values are methods, which keep account of that; what they return are copies.

    Args:
        capacity: number of items, at least 1; after that a new item replaces the oldest.
        fields: name to element type, or to (element type, shape of a value).  A type of torch
            (`torch.bfloat16`) makes a field of tensors on the CPU; all others NumPy arrays.

    Attributes:
        capacity: as given.
        appended: number of items that were ever appended.

    Raises:
        ConfigError: the capacity is not a positive integer, or a field has no usable name, type or shape.
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
        self._fields = {name: _Field.made(name, self.capacity, given) for name, given in fields.items()}

    def __len__(self) -> int:
        return self._count

    @property
    def fields(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name to (element type, shape of a value)."""
        return {name: (field.dtype, field.shape) for name, field in self._fields.items()}

    # ------------------------------------------------------------------------------------ writing

    def append(self, /, **values: Any) -> None:
        """Append an item: a value for each field; after a DataError (a shape, a kind) nothing is written."""
        self._require_fields(values)
        fitted = [(field, field.fitted(values[name], ())) for name, field in self._fields.items()]
        at = self.appended % self.capacity
        for field, value in fitted:
            field.write(slice(at, at + 1), value)
        self._grow(1)

    def extend(self, /, **values: Any) -> None:
        """Append n items: for each field an array of shape (n, ...); the last `capacity` of them are kept."""
        self._require_fields(values)
        lengths = {name: _length(name, value) for name, value in values.items()}
        n = next(iter(lengths.values()))
        if set(lengths.values()) != {n}:
            raise DataError(f"extend() was given different numbers of items: {lengths}")
        fitted = [(field, field.fitted(values[name], (n,))) for name, field in self._fields.items()]
        for field, value in fitted:
            for at, part in self._places(n):
                field.write(at, value[part])
        self._grow(n)

    def update(self, indices: Any, /, **values: Any) -> None:
        """Replace values of some fields, as priorities: for each field an array of shape (len(indices), ...).

        Args:
            indices: as in `memory[indices]`; of an index that is there twice the last value counts.

        Raises:
            IndexError: an index is outside.
            DataError: as `append`, but for missing fields; nothing is written.
        """
        places, shape = self._slots(indices)
        self._require_known(values)
        fitted = [(self._fields[name], self._fields[name].fitted(v, shape)) for name, v in values.items()]
        for field, value in fitted:
            field.scatter(places, value)

    def clear(self) -> None:
        """Forget all items."""
        self._count = 0

    def _places(self, n: int) -> Iterator[tuple[slice, slice]]:
        """Yield (slots, part of the n items) for each contiguous piece."""
        done = max(0, n - self.capacity)
        while done < n:
            at = (self.appended + done) % self.capacity
            count = min(n - done, self.capacity - at)
            yield slice(at, at + count), slice(done, done + count)
            done += count

    def _grow(self, n: int) -> None:
        self.appended += n
        self._count = min(self._count + n, self.capacity)

    def _require_fields(self, values: Mapping[str, Any]) -> None:
        self._require_known(values)
        if missing := [name for name in self._fields if name not in values]:
            raise DataError(f"the item lacks {', '.join(map(repr, missing))}: give each field a value")

    def _require_known(self, values: Mapping[str, Any]) -> None:
        for name in values:
            if name not in self._fields:
                raise DataError(f"the memory has no field {name!r}; {nearest(name, self._fields)}")

    # ------------------------------------------------------------------------------------ reading

    def __getitem__(self, index: Any) -> dict[str, Any]:
        """Copy items by age: 0 is the oldest, -1 the newest.

        Args:
            index: an integer, a slice, or a list, array or tensor of integers.

        Returns:
            Name to value, with the shape of the index before the shape of a value.

        Raises:
            IndexError: an index is outside, or not an integer.
        """
        places, shape = self._slots(index)
        return {name: field.gather(places, shape) for name, field in self._fields.items()}

    def sample(self, n: int, generator: np.random.Generator | None = None) -> dict[str, Any]:
        """Copy n items drawn at random with replacement, each with the same chance.

        Args:
            generator: NumPy's generator to draw from, an entry of the state of its own; None draws from
                `np.random`, whose state is saved by itself.

        Raises:
            DataError: the memory is empty.
        """
        if not self._count:
            raise DataError("sample() from an empty memory: call append() or extend() first")
        draw = np.random.randint if generator is None else generator.integers
        return self[draw(0, self._count, integer("n", n, 0))]

    def _slots(self, index: Any) -> tuple[Any, tuple[int, ...]]:
        """Return the slots at an index by age, 1-D, and the index's shape."""
        if isinstance(index, slice):
            wanted = np.arange(*index.indices(self._count))
        else:
            wanted = np.asarray(index)
            if wanted.size == 0:
                wanted = wanted.astype(np.int64)
        if wanted.dtype.kind not in "iu":
            raise IndexError(f"an index is an integer, a slice, or an array of integers, not {index!r:.60}")
        outside = (wanted < -self._count) | (wanted >= self._count)
        if outside.any():
            raise IndexError(f"no item {wanted[outside].flat[0]}: the memory has {self._count} items")
        flat = wanted.reshape(-1).astype(np.int64)
        oldest = self.appended - self._count
        return (flat % max(self._count, 1) + oldest) % self.capacity, wanted.shape

    # -------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state; its arrays are the live ones, to be copied at once, and never written to."""
        used = min(self.appended, self.capacity)
        return {
            "capacity": self.capacity,
            "appended": self.appended,
            "items": self._count,
            "fields": {name: [field.dtype, list(field.shape)] for name, field in self._fields.items()},
            "chunks": {name: field.chunks(used) for name, field in self._fields.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state that `state_dict` returned; refuse one of another capacity or of other fields."""
        self.compare(state).require_none()
        for name, field in self._fields.items():
            field.load(state["chunks"][name])
        self.appended, self._count = state["appended"], state["items"]

    def compare(self, state: Any) -> Mismatch:
        """Find what does not fit in a state: the capacity, fields, their types and shapes."""
        if not isinstance(state, Mapping) or not {"capacity", "fields", "chunks"} <= state.keys():
            return Mismatch([], [], [f"a {type(state).__name__} -> a RingBuffer"])
        ours = {name: _told(*told) for name, told in self.fields.items()}
        theirs = {name: _told(*told) for name, told in state["fields"].items()}
        found = Mismatch(
            [f"fields/{name}" for name in ours if name not in theirs],
            [f"fields/{name}" for name in theirs if name not in ours],
            [f"fields/{n} {theirs[n]} -> {ours[n]}" for n in ours if theirs.get(n, ours[n]) != ours[n]],
        )
        if state["capacity"] != self.capacity:
            found.reshaped.insert(0, f"capacity {state['capacity']} -> {self.capacity}")
        return found

    def entry(self) -> Entry:
        """Make the entry of the memory."""
        return _RingEntry(self)

    def __copy__(self) -> RingBuffer:
        # two memories over the same arrays could not know of each other's writes
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        told = ", ".join(f"{name} {_told(*each)}" for name, each in self.fields.items())
        return f"RingBuffer({self._count} of {self.capacity} items: {told})"


class _RingEntry(Entry):
    """Entry of a ring buffer."""

    def __init__(self, memory: RingBuffer) -> None:
        self.memory = memory

    def save(self) -> Any:
        return self.memory.state_dict()

    def check(self, tree: Any) -> Mismatch:
        return self.memory.compare(tree)

    def load(self, tree: Any) -> None:
        self.memory.load_state_dict(tree)


def _length(name: str, value: Any) -> int:
    try:
        return len(value)
    except TypeError:
        raise DataError(f"extend() takes arrays of items, got {value!r:.60} for {name!r}") from None


def _told(dtype: str, shape: Any) -> str:
    return f"{dtype} {tuple(shape)}"


class _Field:
    """Values of one field, and the chunks in which they are saved.

    Attributes:
        dtype: name of the element type; torch's own begin with "torch.".
        shape: shape of a value.
    """

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...], storage: Any) -> None:
        self._name, self.dtype, self.shape = name, dtype, shape
        self._storage = storage
        self._look()

    @classmethod
    def made(cls, name: str, capacity: int, given: Any) -> _Field:
        dtype, shape = given if isinstance(given, tuple | list) and len(given) == 2 else (given, ())
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        shape = tuple(integer(f"size in the shape of {name!r}", size, 0) for size in shape)
        for backend in reversed(backends.active()):
            try:
                storage = backend.zeros((capacity, *shape), dtype)
            except (MemoryError, ValueError, RuntimeError, TypeError) as error:
                # each framework has its own error for a size that no memory, or no index, has
                raise ConfigError(
                    f"a RingBuffer of {capacity:,} items cannot have the field {name!r} of {given!r:.80}: "
                    f"{str(error).splitlines()[0]:.200}; give a capacity that fits in memory"
                ) from error
            if storage is not None and name.isidentifier():
                return cls(name, str(storage.dtype), shape, storage)
        raise ConfigError(
            f"the field {name!r} of a RingBuffer cannot be {given!r:.80}: a field has the name of a "
            'variable, and an element type with or without the shape of a value, as in ("uint8", (84, 84))'
        )

    def _look(self) -> None:
        """Make the views that are saved; they live as long as the storage, and no program writes to them."""
        fitting = CHUNK // max(self._storage[:1].nbytes, 1)
        self._length = 1 << max(0, fitting.bit_length() - 1)
        count = -(-len(self._storage) // self._length)
        self._views = [self._view(i * self._length, (i + 1) * self._length) for i in range(count)]
        self._begun: dict[int, Any] = {}
        """The filled slots of the chunk that is being filled, as saved last, by the chunk's number."""
        self._version = _version(self._storage)
        """torch's count of changes: of such that went past this class, too."""

    def _view(self, start: int, stop: int) -> Any:
        view = self._storage[start:stop]
        if isinstance(view, np.ndarray):
            view.flags.writeable = False
        return view

    def fitted(self, value: Any, before: tuple[int, ...]) -> Any:
        """Return a value as an array of the storage's kind, with the shape `before` and that of a value."""
        storage = self._storage
        try:
            array = np.asarray(value) if isinstance(storage, np.ndarray) else _like(storage, value)
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(f"the field {self._name!r} cannot hold {value!r:.60}: {error}") from None
        if tuple(array.shape) != before + self.shape:
            raise DataError(
                f"the field {self._name!r} takes values of shape {before + self.shape}, "
                f"got {tuple(array.shape)}"
            )
        if isinstance(storage, np.ndarray) and array.dtype != storage.dtype:
            array = self._cast(array, value)
        return array

    def _cast(self, array: Any, value: Any) -> Any:
        """Convert to the storage's type, where no value is lost: a float would be cut, 300 wrapped."""
        dtype = self._storage.dtype
        if array.size and not np.can_cast(array.dtype, dtype, "same_kind"):
            integers = array.dtype.kind in "biu"
            cast = array.astype(dtype) if integers else array
            if not (integers and np.array_equal(cast, array)):
                raise DataError(
                    f"the field {self._name!r} is {dtype}, and {array.dtype} {value!r:.60} does not fit: "
                    "convert it"
                )
            return cast
        return array

    def write(self, at: slice, value: Any) -> None:
        """Write to the slots `at`."""
        try:
            self._storage[at] = value
        finally:
            # also where the write broke off
            for index in range(at.start // self._length, (at.stop - 1) // self._length + 1):
                self._unstamp(index)
            self._version = _version(self._storage)

    def scatter(self, places: Any, value: Any) -> None:
        """Write to single slots."""
        # of equal places the last counts, and frameworks promise nothing
        _, last = np.unique(places[::-1], return_index=True)
        chosen = len(places) - 1 - last
        try:
            self._storage[places[chosen]] = value.reshape((len(places), *self.shape))[chosen]
        finally:
            for index in set((places // self._length).tolist()):
                self._unstamp(index)
            self._version = _version(self._storage)

    def gather(self, places: Any, shape: tuple[int, ...]) -> Any:
        """Copy the values of slots."""
        found = self._storage[places]
        return found.reshape((*shape, *self.shape))

    def chunks(self, used: int) -> list[Any]:
        """Return the chunks of the first `used` slots, with stamps; of the last one its used slots alone."""
        if _version(self._storage) != self._version:
            self._forget()
        index, rest = divmod(used, self._length)
        views = self._views[:index]
        if rest:
            views.append(self._filled(index, rest))
        for view in views:
            stamp(view)
        return views

    def _filled(self, index: int, rest: int) -> Any:
        """Return the first slots of a chunk: the same view while their number stays, as it has the stamp."""
        if rest == len(self._views[index]):
            return self._views[index]
        if index not in self._begun or len(self._begun[index]) != rest:
            start = index * self._length
            self._begun = {index: self._view(start, start + rest)}
        return self._begun[index]

    def _unstamp(self, index: int) -> None:
        unstamp(self._views[index])
        if index in self._begun:
            unstamp(self._begun[index])

    def load(self, chunks: list[Any]) -> None:
        """Copy saved chunks, of whatever length."""
        if isinstance(self._storage, np.ndarray) and not self._storage.flags.writeable:
            # of a copy that shares its arrays with the original
            self._storage = np.zeros_like(self._storage)
            self._look()
        try:
            at = 0
            for chunk in chunks:
                if at + len(chunk) > len(self._storage):
                    raise RestoreError(f"the field {self._name!r} has more items than the capacity")
                self._storage[at : at + len(chunk)] = chunk
                at += len(chunk)
        finally:
            self._forget()

    def _forget(self) -> None:
        for index in range(len(self._views)):
            self._unstamp(index)
        self._version = _version(self._storage)

    def __getstate__(self) -> tuple[Any, ...]:
        # a copy: torch would give a worker process the memory itself, whose writes nobody here would know of
        return (self._name, self.dtype, self.shape, copy.deepcopy(self._storage))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Field:
        return _Field(self._name, self.dtype, self.shape, copy.deepcopy(self._storage, memo))

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _Field.__init__(self, *state)


def _like(storage: Any, value: Any) -> Any:
    """Make a tensor of a value, with the storage's element type; a tensor stays as it is."""
    if type(value) is type(storage):
        if value.is_floating_point() and not storage.is_floating_point():
            raise ValueError(f"{value.dtype} does not fit {storage.dtype}: convert it")
        return value.detach()
    given = np.asarray(value)
    if given.size and given.dtype.kind == "f" and not (storage.is_floating_point() or storage.is_complex()):
        raise ValueError(f"a float does not fit {storage.dtype}: convert it")
    return storage.new_tensor(value)


def _version(storage: Any) -> int:
    """Return torch's count of the changes of a tensor's memory; 0 where nobody counts."""
    try:
        return int(getattr(storage, "_version", 0))
    except RuntimeError:  # a tensor that was made in inference mode
        return 0
