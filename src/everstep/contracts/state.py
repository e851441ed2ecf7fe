"""State: what a user's own object needs to be saved (`Stateful`), and what a framework gives (`Backend`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Json: TypeAlias = bool | int | float | str | list[Any] | dict[str, Any] | None
"""A value that JSON can hold (tuples, int keys, bytes ... are the state codec's business)."""


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state can be taken and given back: models, optimizers, schedulers, your own."""

    def state_dict(self) -> Any:
        """The state: nested dicts, lists, tuples of arrays and plain values."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Become what `state_dict` described."""


@dataclass
class HostArray:
    """An array's bytes in host memory, and how to make the array again.

    Attributes:
        dtype: safetensors' name of the element type ("F32", "BF16", "I64", "BOOL" ...); "U8" with
            `extra["dtype"]` set where safetensors has no name for it.
        shape: the array's shape.
        data: its bytes in C order, uint8, 1-D, contiguous and writable.
        backend: name of the backend that made it and makes the array again ("numpy", "torch").
        extra: what else the backend needs for that, JSON only (device, memory order ...).
    """

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    backend: str
    extra: dict[str, Any] = field(default_factory=dict)


class Mismatch(NamedTuple):
    """How a saved tree differs from what an entry expects, as names ("layer.weight (4, 2) -> (8, 2)")."""

    missing: list[str]
    unexpected: list[str]
    reshaped: list[str]


BESIDE = frozenset({"_metadata", "_buffers", "_flags", "_attributes"})
"""Keys under which the tree of a model has what is none of its weights."""


class Entry(ABC):
    """One named entry of the user's state, whatever object is behind it."""

    is_random: ClassVar[bool] = False
    """Whether it is a generator of random numbers."""

    def as_seeded(self) -> bool:
        """Of a generator: whether it is known that nothing was drawn since it was seeded."""
        return False

    @abstractmethod
    def save(self) -> Any:
        """A tree (dicts, lists, tuples, arrays, plain values) that refers to live arrays: copied at once."""

    def check(self, tree: Any) -> Mismatch:
        """What of `tree` would not fit, without changing anything.  Empty lists where it cannot be told."""
        return Mismatch([], [], [])

    def expects(self) -> Callable[[Any], Mismatch]:
        """`check` for the object as it is now, to be asked later: training may add parts to the object."""
        return self.check

    @abstractmethod
    def load(self, tree: Any) -> None:
        """Become what `save` described; the object stays the same object."""

    def guarded(self, path: tuple[Any, ...]) -> bool:
        """Whether the array at `path` in `save()`'s tree must be finite (parameters, moments)."""
        return False

    def inner(self) -> Iterator[tuple[Any, Entry]]:
        """Of a container, the entries of what is in it, by key."""
        return iter(())

    def enter(self) -> None:  # noqa: B027
        """A loop is entered: what the object has now is what the program gives."""

    def leave(self) -> None:  # noqa: B027
        """The loop is left: what the object has now is what training made of it."""

    def options(self) -> dict[str, str]:
        """How the program made the object, where that changes training: name to value, as texts.

        The checkpoint keeps it, for comparison on resume; a learning rate, for example, is saved state
        too, and what the program gives for it would else be overruled in silence.  Functions are described
        by `everstep.backends.described`.
        """
        return {}

    def in_schedule(self, option: str) -> bool:
        """Whether an option belongs to a schedule, whose counts of steps may grow with the run's limit."""
        return False

    def use_options(self, names: Collection[str]) -> None:  # noqa: B027
        """After `load`: go on with these options as the program gave them."""


class OutsideWatch(Protocol):
    """Looks at objects of the framework that the state does not save."""

    def changed(self, epoch: int) -> list[str]:
        """Classes of those that changed since the last call; called after each step, of this epoch."""

    def skip(self) -> None:
        """What has changed until now was changed by no step."""


class UpdateWatch(Protocol):
    """Counts the updates that really happen (optimizer steps), and knows open accumulation windows."""

    updates: int
    """How many optimizer steps happened."""
    optimizers: int
    """How many optimizers the state has; 0 where only strangers are looked out for."""

    @property
    def outside(self) -> OutsideWatch:
        """What looks at objects that the state does not save."""

    def gradients(self) -> Any:
        """The gradients as a tree, or None where the state needs none (no window is open)."""

    def load_gradients(self, tree: Any) -> None:
        """Put saved gradients back; None clears them."""

    def left_out(self) -> bool:
        """Whether updates that were due were left out, their gradients not being finite."""

    def strangers(self) -> list[str]:
        """Descriptions of optimizers that training depends on without their being part of the state."""

    def unsaved(self, user: Any) -> list[str]:
        """Descriptions of parameters that the state's optimizers step and that no entry of it saves.

        Args:
            user: the saved tree of each entry by its name.
        """

    def recomputing(self, owner: str, option: str) -> list[str]:
        """Descriptions of schedulers that compute an option of optimizer `owner` anew at each step."""

    def unscheduled(self) -> list[str]:
        """Names of the state's optimizers whose learning rate has a schedule that the state lacks."""

    def close(self) -> None:
        """Remove every hook."""


class Backend(Protocol):
    """A framework (NumPy, torch ...): the only code that touches its arrays and its random state."""

    name: str
    array_types: tuple[type, ...]

    def random_state(self) -> Any:
        """The framework's global random state as a tree."""

    def set_random_state(self, state: Any) -> None:
        """Restore what `random_state` returned."""

    def seed(self, seed: int) -> None:
        """Seed the framework's global generators."""

    def to_host(self, array: Any, reuse: HostArray | None) -> HostArray:
        """Copy an array to host memory, into `reuse`'s buffer where that fits."""

    def from_host(self, host: HostArray) -> Any:
        """The array again, equal in type, dtype, shape and memory order, on the host or its device."""

    def pack(self, value: Any) -> tuple[str, Any] | None:
        """A value that is no dense array (a dtype, a NumPy scalar ...) as (kind, tree), None if foreign."""

    def unpack(self, kind: str, tree: Any) -> Any:
        """The value again, equal in type and bits."""

    def scalar(self, value: Any) -> Any:
        """A metric value kept for later: a float where that needs no waiting, else a detached copy.

        Raises:
            MetricError: more than one element, or not a real number.
        """

    def read_scalars(self, values: Sequence[Any]) -> list[float]:
        """The floats of what `scalar` kept, in one transfer."""

    def host_view(self, array: Any) -> NDArray[Any] | None:
        """The elements of an array in host memory, shared and not copied; None where they are not there.

        It never waits.  An element type that NumPy lacks may be given as integers of its size.
        """

    def is_deterministic(self) -> bool:
        """Whether the same operations on the same values give the same bits, as far as the settings tell."""

    def entry(self, value: Any) -> Entry | None:
        """The entry for one of this framework's own objects, None for anything else."""

    def watch_updates(self, objects: Mapping[str, Any]) -> UpdateWatch | None:
        """Watch the optimizers among the state's objects, and strangers that should be among them.

        None for a framework without optimizers.
        """

    def parameters(self, objects: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...], bool]]:
        """(name, shape, trainable) of each parameter of the state's models, for the summary table."""

    def evaluation_mode(self, objects: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Switch the state's models to evaluation inside the block; afterwards every flag is as before."""

    def synchronize(self) -> None:
        """Wait until the device has done what was asked of it; of what nobody has used yet, nothing."""

    def processes(self) -> int:
        """How many processes compute together by the framework's own means, this one included."""

    def describe(self) -> dict[str, str]:
        """Version and devices, for the run's record."""

    def fingerprint(self, objects: Mapping[str, Any]) -> dict[str, str]:
        """What decides the last bits of what the framework computes here and now, as texts by name.

        Its version and those of its libraries, the processor's features that it uses, threads, flags, and
        the devices on which the state's `objects` lie.  Two processes in which it is equal compute equal
        bits from equal input, as far as the framework promises that.  What only changes speed is left out.
        """
