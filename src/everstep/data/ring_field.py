"""One field of a replay memory: its values, and the chunks in which they are saved."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from everstep import backends
from everstep.arguments import integer
from everstep.errors import ConfigError, DataError, RestoreError
from everstep.state import stamps

CHUNK = 2 << 20
"""Bytes of a chunk, at most, unless a single item is larger."""


class Field:
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
    def made(cls, name: str, capacity: int, given: Any) -> Field:
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
            stamps.stamp(view)
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
        stamps.unstamp(self._views[index])
        if index in self._begun:
            stamps.unstamp(self._begun[index])

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

    def __deepcopy__(self, memo: dict[int, Any]) -> Field:
        return Field(self._name, self.dtype, self.shape, copy.deepcopy(self._storage, memo))

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        Field.__init__(self, *state)


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
