"""Protocols of state: objects that can be saved (`Stateful`) and frameworks (`Backend`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from everstep.contracts.group import DataRanks
from everstep.errors import RestoreError

Json: TypeAlias = bool | int | float | str | list[Any] | dict[str, Any] | None
"""Value that JSON can hold (the state codec handles tuples, integer keys, bytes ...)."""


@runtime_checkable
class Stateful(Protocol):
    """Object whose state can be taken and given back: a model, optimizer, scheduler, or your own."""

    def state_dict(self) -> Any:
        """Return the state: nested dicts, lists, tuples of arrays and plain values."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take the state that `state_dict` returned."""


@dataclass(frozen=True)
class Region:
    """Box of a large array that this process holds, where several processes hold the array together.

    Attributes:
        offset: index, in the whole array, of the box's first element.
        shape: shape of the box; a process may hold no element of an array.
        whole: shape of the whole array.
        holders: ranks that hold this very box, in ascending order.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    holders: tuple[int, ...]


Regions: TypeAlias = Callable[[str, tuple[int, ...]], Region | None]
"""Function that tells which region of an array, given by name and whole shape, is wanted; None for all."""


@dataclass
class HostArray:
    """Bytes of an array in host memory, and how to make the array again.

    Attributes:
        dtype: safetensors' name of the element type ("F32", "BF16", "I64", "BOOL" ...); "U8" with
            `extra["dtype"]` set where safetensors has no name for it.
        shape: the array's shape.
        data: the array's bytes in C order, uint8, 1-D, contiguous and writable.
        backend: name of the backend that copied the array and makes it again ("numpy", "torch").
        extra: further facts that the backend needs to make the array, JSON only (device, memory order ...).
        region: of which part of a larger array these are the elements; None for an array that is whole.
        xxh3_128: digest of `data` in hex, where it is noted; None where `data` may have changed since.
        stamp: stamp of the array that was copied (`everstep.state.stamp`); None if it had none.
    """

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    backend: str
    extra: dict[str, Any] = field(default_factory=dict)
    region: Region | None = None
    xxh3_128: str | None = field(default=None, kw_only=True, compare=False, repr=False)
    stamp: object | None = field(default=None, kw_only=True, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Number of bytes, without a look at them."""
        return self.data.nbytes

    def with_extra(self, extra: dict[str, Any]) -> HostArray:
        """Return the same array with other facts; both have the same bytes."""
        other = copy(self)
        other.extra = extra
        return other


class LazyArray(HostArray):
    """Array whose bytes `fetch` returns, in new memory, each time `data` is asked for."""

    def __init__(
        self,
        dtype: str,
        shape: tuple[int, ...],
        backend: str,
        extra: dict[str, Any],
        region: Region | None,
        nbytes: int,
        fetch: Callable[[], NDArray[np.uint8]],
        xxh3_128: str | None = None,
    ) -> None:
        self.dtype, self.shape, self.backend, self.extra = dtype, shape, backend, extra
        self.region = region
        self._nbytes, self._fetch = nbytes, fetch
        self.xxh3_128, self.stamp = xxh3_128, None

    @property
    def data(self) -> NDArray[np.uint8]:  # type: ignore[override]
        return self._fetch()

    @property
    def nbytes(self) -> int:
        return self._nbytes


@dataclass(frozen=True)
class Unread:
    """Array in a file, which nobody has read yet.

    Attributes:
        dtype: safetensors' name of the element type, or the framework's own name of another type.
        shape: the array's shape.
        read: reads the elements, into memory of their own.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], HostArray]


class ArrayFacts(NamedTuple):
    """Facts of a live array.

    Attributes:
        dtype: name of the element type, as in `Unread`.
        place: equal for two arrays that are the same elements of the same memory; None for an empty array.
    """

    dtype: str
    place: Any


class Mismatch(NamedTuple):
    """Difference between a saved tree and the expected tree, as names ("layer.weight (4, 2) -> (8, 2)")."""

    missing: list[str]
    unexpected: list[str]
    reshaped: list[str]

    def require_none(self) -> None:
        """Refuse a saved tree that differs; the RestoreError has the three lists."""
        if any(self):
            raise RestoreError("the saved state does not fit", **self._asdict())


BASE = "_base"
"""Key of the descriptions of what a model's tree does not have, because it was not trained."""
BESIDE = frozenset({"_metadata", "_buffers", "_flags", "_attributes", BASE})
"""Keys of a model's tree that hold other things than weights."""


KINDS = "modules()"
"""Last part of the path by which `UnsavedObjects.numbers` returns the classes of a model's parts."""


class Entry(ABC):
    """Named entry of the user's state, whatever object is behind it."""

    is_random: ClassVar[bool] = False
    """Whether the object is a generator of random numbers."""
    copies: ClassVar[bool] = False
    """Whether `load` only copies the elements of arrays, so that they may be read from a file just then."""
    may_refuse: bool = True
    """Whether `load` may raise where `check` has found nothing: it runs code of the object's own class."""
    rank_keys: Collection[str] = ()
    """Keys of `save()`'s tree whose values are a rank's own, where the rest is the same on all ranks."""
    on_growth: ClassVar[str] = "make them before the loop opens, or leave the entry out of state"
    """What a program should do whose training gives the object other parts."""

    def as_seeded(self) -> bool:
        """Whether the object is a generator that surely drew nothing since it was seeded."""
        return False

    @abstractmethod
    def save(self) -> Any:
        """Return a tree (dicts, lists, tuples, arrays, plain values) of live arrays, to be copied at once."""

    def check(self, tree: Any) -> Mismatch:
        """Find what does not fit in `tree`, without any change.  Empty lists where this cannot be told."""
        return Mismatch([], [], [])

    def expects(self) -> Callable[[Any], Mismatch]:
        """Return `check` for the object as it is now, to be called after training added parts to it."""
        return self.check

    def proof(self) -> Callable[[], None] | None:
        """Return a function that tries what the last `save` claims of live arrays; None if it claims nothing.

        The writer thread calls it before the commit, while training continues; it raises StateError.
        """
        return None

    @abstractmethod
    def load(self, tree: Any) -> None:
        """Take the state that `save` returned; the object stays the same object."""

    def guarded(self, path: tuple[Any, ...]) -> bool:
        """Whether the array at `path` in `save()`'s tree must be finite (parameters, moments)."""
        return False

    def inner(self) -> Iterator[tuple[Any, Entry]]:
        """Yield (key, entry) for each item of a container."""
        return iter(())

    def relate(self, entries: Mapping[str, Entry]) -> None:  # noqa: B027
        """Look at all entries of the state, when they have been made: an optimizer steps what models hold."""

    def layouts(self) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Yield (path, live array): saved arrays at and below the path are held as that array is held."""
        return iter(())

    def enter(self, run: str | None = None) -> None:  # noqa: B027
        """Note that a loop is entered: the object's values now are the program's.

        `run`: id of the run; None where nothing is trained.
        """

    def leave(self) -> None:  # noqa: B027
        """Note that the loop is left: the object's values now are training's."""

    def options(self) -> dict[str, str]:
        """Return the options of the object that change training, as strings by name; a resume compares them.

        A learning rate, for example, is saved state too, and would silently overrule the program's.
        """
        return {}

    def in_schedule(self, option: str) -> bool:
        """Whether an option belongs to a schedule, whose counts of steps may grow with the run's limit."""
        return False

    def use_options(self, names: Collection[str]) -> None:  # noqa: B027
        """Use these options as the program gave them; called after `load`."""


class StateDictEntry(Entry):
    """Entry of an object with `state_dict` and `load_state_dict`."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def save(self) -> Any:
        return self.obj.state_dict()

    def load(self, tree: Any) -> None:
        self.obj.load_state_dict(tree)


class OwnEntry(ABC):
    """Object that makes its own entry: one that can refuse a state before anything is loaded."""

    @abstractmethod
    def entry(self) -> Entry:
        """Make the object's entry."""


class Declaration(OwnEntry):
    """Object of the state with a word on how it is saved: the loop uses `value`, the bare object."""

    value: Any


class UnsavedObjects(Protocol):
    """Finder of what steps change and the state does not save."""

    def watch(self, task: Any, *, saved: bool) -> None:
        """Look at the attributes of a task, too; `saved`: only at those that are not saved with the state."""

    def changed(self, epoch: int) -> list[str]:
        """Return paths or classes of what changed since the last call; called after each step."""

    def skip(self) -> None:
        """Forget the changes until now: no step made them."""

    def numbers(self) -> Mapping[str, Any]:
        """Return, by path, numbers and strings of objects that the task and the state's modules hold.

        Only those that are not saved with them.
        """


class UpdateCounter(Protocol):
    """Counter of the updates that really happen (optimizer steps); knows open accumulation windows."""

    updates: int
    """Count of optimizer steps."""
    optimizers: int
    """Count of the state's optimizers; 0 where the counter looks for strangers only."""

    @property
    def outside(self) -> UnsavedObjects:
        """Finder of changed objects that the state does not save."""

    def digest(self) -> int | None:
        """Digest a small parameter that the state's optimizers step; None without one in host memory."""

    def gradients(self) -> Any:
        """Return the gradients as a tree, or None where the state needs none (no window is open)."""

    def load_gradients(self, tree: Any) -> None:
        """Put saved gradients back; None clears them."""

    def left_out(self) -> bool:
        """Whether due updates were left out because their gradients were not finite."""

    def strangers(self) -> list[str]:
        """Describe the optimizers that training depends on and that are not part of the state."""

    def unsaved(self, user: Any) -> list[str]:
        """Describe the parameters that the state's optimizers step and that no entry's saved tree has."""

    def recomputing(self, owner: str, option: str) -> list[str]:
        """Describe the schedulers that compute an option of optimizer `owner` anew at each step."""

    def unscheduled(self) -> list[str]:
        """List the state's optimizers that have a schedule since the last call, which the state lacks."""

    def close(self) -> None:
        """Remove every hook."""


class Backend(Protocol):
    """Framework (NumPy, torch ...): the only code that touches its arrays and its random state.

    What has a body here is right for a framework without optimizers, devices and processes of its own.
    """

    name: str
    array_types: tuple[type, ...]

    def random_state(self) -> Any:
        """Return the framework's global random state as a tree."""

    def set_random_state(self, state: Any) -> None:
        """Restore a result of `random_state` or of `portable_random`."""

    def portable_random(self, state: Any) -> Any:
        """Return of a result of `random_state` what another rank can have, on the device that it computes on.

        It is equal on ranks that have drawn the same numbers, whatever the number of their device.
        """
        return state

    def seed(self, seed: int) -> None:
        """Seed the framework's global generators."""

    def to_host(self, array: Any, reuse: HostArray | None) -> HostArray:
        """Copy an array to host memory, into `reuse`'s buffer where the buffer fits."""

    def in_place(self, array: Any) -> HostArray:
        """Describe an array without a copy of it, to be read while nobody writes to it.

        The bytes are the array's own where they lie in host memory as `HostArray.data` has them; else they
        are fetched when they are asked for.
        """

    def from_host(self, host: HostArray) -> Any:
        """Make the array again, equal in type, dtype, shape and memory order, on the host or its device."""

    def late(self, array: Unread) -> Any:
        """Make an array on the host; its elements may be read anew by each operation that needs them."""
        return self.from_host(array.read())

    def facts(self, array: Any) -> ArrayFacts:
        """Return the facts of an array; never waits."""

    def pack(self, value: Any) -> tuple[str, Any] | None:
        """Pack a value that is not a dense array (a NumPy scalar ...) as (kind, tree); None if foreign."""

    def unpack(self, kind: str, tree: Any) -> Any:
        """Make the value again, equal in type and bits."""

    def region(self, array: Any) -> Region | None:
        """Return the region of a larger array that this process holds; None if it holds all of it."""
        return None

    def scalar(self, value: Any) -> Any:
        """Keep a metric value for later: a float where that needs no waiting, else a detached copy.

        Raises:
            MetricError: more than one element, or not a real number.
        """

    def read_scalars(self, values: Sequence[Any]) -> list[float]:
        """Return the floats of values that `scalar` kept, in one transfer."""
        return [float(value) for value in values]

    def digest_small(self, arrays: Sequence[Any], seed: int) -> tuple[int, int]:
        """Fold arrays of at most `numpy.WHOLE` bytes in host memory into a digest, while they last.

        Each is folded by `numpy.small_digest`.  A step asks this of its batch, so it must be fast; it never
        waits, and changes nothing that the arrays can do.

        Returns:
            The digest, and the number of arrays in it: the next one is not small, not plain or elsewhere.
        """

    def host_view(self, array: Any) -> NDArray[Any] | None:
        """View an array's elements in host memory, without a copy; None where they are elsewhere.

        Never waits, and changes nothing that the array can do.  The view is valid while the array lives and
        keeps its memory.  An element type that NumPy lacks may be given as integers of its size.
        """

    def rows(self, array: Any, order: NDArray[np.int64]) -> Callable[[slice], Any]:
        """Return a function from places in `order`, numbers of rows, to a copy of these rows of an array."""

    def is_deterministic(self) -> bool:
        """Whether, by the settings, the same operations on the same values give the same bits."""
        return True

    def entry(self, value: Any) -> Entry | None:
        """Make the entry for one of this framework's own objects; None for any other object."""

    def attributes(self, owner: Any, objects: Mapping[str, Any]) -> Entry | None:
        """Make the entry of an object's attributes, but for what the state's `objects` save; None: none."""
        return None

    def update_counter(self, objects: Mapping[str, Any]) -> UpdateCounter | None:
        """Watch the optimizers among the state's objects, and strangers that should be among them."""
        return None

    def shapes_watched(
        self, objects: Mapping[str, Any], warn: Callable[[str], None]
    ) -> AbstractContextManager[None]:
        """Warn, in the block, once of each model whose kernels depend on the shapes that came before."""
        return nullcontext()

    def parameters(self, objects: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...], bool]]:
        """List (name, shape, trainable) of each parameter of the state's models, for the summary table."""

    def evaluation_mode(
        self, objects: Mapping[str, Any], *, grad: bool = False
    ) -> AbstractContextManager[None]:
        """Switch the state's models, and what holds them, to evaluation in the block."""
        return nullcontext()

    def synchronize(self) -> None:
        """Wait until the device has done all its work; a device that nobody has used is left alone."""
        return

    def processes(self) -> int:
        """Count the processes that compute together by the framework's own means, this process included."""
        return 1

    def mesh(self, value: Any) -> tuple[int | None, list[int]] | None:
        """Return the own place in a mesh (None outside it) and its ranks; None for other objects."""
        return None

    def require_synchronised(self, objects: Mapping[str, Any], data: DataRanks) -> None:
        """Raise ConfigError for objects of the state that each process would train on its own, or inexactly.

        Objects that may differ between the processes are not among `objects`.
        """
        return

    def exact_on_any_ranks(self, objects: Mapping[str, Any]) -> bool:
        """Whether a step is known to have the same bits, and equal gradients, on any number of processes."""
        return False

    def prepare_ranks(self, objects: Mapping[str, Any], data: DataRanks) -> None:
        """Make training on several processes exact: a step has the same bits in every start of the run.

        All processes call this at the same place, with equal objects, between entry and the first step;
        at a resume after the state is loaded.  It may communicate.  Values of the state, gradients and random
        state stay as they are, but for buffers that the framework shares, which become the writer's.
        """
        return

    def describe(self) -> dict[str, str]:
        """Describe the version and the devices, for the run's record."""

    def fingerprint(self, objects: Mapping[str, Any]) -> dict[str, str]:
        """Return what decides the last bits of the framework's results here and now, as strings by name.

        The versions of the framework and its libraries, the processor's features in use, threads, flags, and
        the devices on which the state's `objects` lie.  Two processes with equal fingerprints compute equal
        bits from equal input, as far as the framework promises.  Settings that only change speed are left
        out.  "layout", if given, is how the state is divided among the ranks: the same text on all of them.
        """
