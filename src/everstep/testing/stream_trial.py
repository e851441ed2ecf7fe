"""Trial of data on copies: does it come back to its place?

Batches are drawn from a copy, its position is taken, two more are drawn; a second copy, in another random
state, is opened at that position, as by a new process, and must draw the same two.  Data is not tried that
would take long or cannot be copied (open files, connections, iterators).
"""

from __future__ import annotations

import copy
import gc
import logging
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import numpy as np

from everstep import backends
from everstep.contracts.data import Cursor, Stream
from everstep.errors import NotResumableError, StateError
from everstep.state import capture, isolated, restore

BATCHES = 2
"""Number of batches that are drawn after a position, and compared."""
BEFORE = 128
"""Number of batches that are drawn before the position, if that takes no longer than `SLOWEST`: data that
reads ahead in blocks tells the start of a block first."""
LARGEST = 64 << 20
"""Bytes up to which data is copied; large arrays of NumPy are shared, and cannot be written to."""
MOST = 20_000
"""Number of objects up to which data is looked through."""
SLOWEST = 0.25
"""Seconds up to which the first batch of the run may have taken."""
SECONDS = 1.0
"""Seconds after which a trial is given up."""


class Verdict(NamedTuple):
    """Result of a trial.

    Attributes:
        kept: whether the data, or the object, comes back; None: it was not tried.
        why: how that is known, or why there was no trial.
    """

    kept: bool | None
    why: str


class _GivenUpError(Exception):
    """Ends a trial without a verdict."""


def pristine(stream: Stream) -> Any:
    """Copy a stream as it was given; else return a string with the reason."""
    if stream.spent or isinstance(stream.keeps_place, Iterator):
        return "it is an iterator, which can be read once only"
    return copied(stream)


def copied(obj: Any) -> Any:
    """Return a copy, or a string with the reason why there is none."""
    try:
        return _copy(obj)
    except _GivenUpError as reason:
        return str(reason)
    except Exception as error:
        return f"it cannot be copied ({type(error).__name__}: {error})"


def try_stream(stream: Stream, name: str = "train", seed: int = 0) -> Verdict:
    """Try a stream, by reading copies of it.

    Args:
        stream: a copy of the data as it was given.
        name: the purpose under which it is opened.
        seed: the seed of the run.
    """
    subject = _Subject(stream, name, seed, time.monotonic())
    with isolated(), quiet():
        try:
            if _comes_back(subject):
                return Verdict(True, f"{BATCHES} batches drawn again were the same")
            return Verdict(False, "batches drawn again from a position were others")
        except NotResumableError as reason:
            return Verdict(False, str(reason))
        except _LiesError as reason:
            return Verdict(False, str(reason))
        except _GivenUpError as reason:
            return Verdict(None, str(reason))
        except Exception as error:
            return Verdict(None, f"the trial failed ({type(error).__name__}: {error})")


class _LiesError(Exception):
    """Says that the data does not come back: no position can be taken, or opened."""


class _Subject(NamedTuple):
    stream: Stream
    name: str
    seed: int
    began: float

    def open(self, stream: Stream, pass_index: int = 0, position: Any = None) -> closing[Cursor]:
        return closing(stream.open(self.name, pass_index, position, seed=self.seed))

    def late(self) -> bool:
        return time.monotonic() - self.began > SECONDS

    def draw(self, cursor: Cursor, count: int = BATCHES, seconds: float = SECONDS) -> list[Any]:
        batches: list[Any] = []
        until = time.monotonic() + seconds
        while len(batches) < count and (not batches or time.monotonic() < until):
            if self.late():
                raise _GivenUpError(f"it takes longer than {SECONDS:g} s")
            try:
                batches.append(comparable(next(cursor)))
            except StopIteration:
                break
        if batches and all(batch == _UNKNOWN for batch in batches):
            raise _GivenUpError("its batches hold nothing that can be compared")
        return batches


def _comes_back(subject: _Subject, before: int = BEFORE) -> bool:
    """Whether the batches after a position come again; after an earlier position if the pass ends there."""
    first, second = _copy(subject.stream), _copy(subject.stream)
    with subject.open(first) as cursor:
        if not subject.draw(cursor, before, SLOWEST):
            raise _GivenUpError("it gave no batch")
        position, state = _position(cursor), capture()
        expected = subject.draw(cursor)
    if not expected and before > 1:
        return _comes_back(subject, before // 2)
    if not expected:
        raise _GivenUpError("it gave one batch only")
    try:
        opened = subject.open(second, 0, position)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise _LiesError(f"it cannot be opened at its position ({cause})") from error
    with opened as cursor:
        # opened in another random state, as by a new process; the batches are drawn in the same one
        restore(state)
        return expected == subject.draw(cursor)


def _position(cursor: Cursor) -> Any:
    try:
        return cursor.position()
    except NotResumableError:
        raise
    except Exception as error:
        raise _LiesError(f"its state cannot be saved ({type(error).__name__}: {error})") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings and logs of data, which would be about the trial and not about the run."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


_OUTSIDE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)
_SHARED = 1 << 20


def _copy(obj: Any) -> Any:
    """Copy an object; arrays of more than 1 MiB are shared, as views that cannot be written to.

    Raises:
        _GivenUpError: the copy would take long.
    """
    arrays, others = _contents(obj)
    if others > LARGEST:
        raise _GivenUpError(f"it holds more than {LARGEST >> 20} MiB")
    memo = {id(array): array.view() for array in arrays}
    for view in memo.values():
        view.flags.writeable = False
    return copy.deepcopy(obj, memo)


def _contents(obj: Any) -> tuple[list[Any], int]:
    """Find the large arrays in an object, and the bytes of all other data, up to the limits."""
    seen: dict[int, Any] = {}
    todo, arrays, others = [obj], [], 0
    while todo and others <= LARGEST:
        each = todo.pop()
        if id(each) in seen or isinstance(each, _OUTSIDE):
            continue
        seen[id(each)] = each
        if len(seen) > MOST:
            raise _GivenUpError(f"it holds more than {MOST} objects")
        if type(each) is np.ndarray and each.nbytes > _SHARED and not each.dtype.hasobject:
            arrays.append(each)
            continue
        others += _bytes(each)
        todo.extend(gc.get_referents(each))
    return arrays, others


def _bytes(obj: Any) -> int:
    if isinstance(obj, bytes | bytearray | str):
        return len(obj)
    size = getattr(obj, "nbytes", 0) if hasattr(type(obj), "nbytes") else 0
    return size if isinstance(size, int) else 0


def _unknown(value: Any) -> str:
    return _UNKNOWN


_UNKNOWN = "unknown"


def comparable(tree: Any, other: Callable[[Any], Any] = _unknown) -> Any:
    """Make a comparable copy of a tree of containers, arrays, tensors and plain values, equal bit for bit.

    Args:
        other: makes the stand-in for an object of another type.
    """
    if isinstance(tree, Mapping):
        return [(str(key), comparable(tree[key], other)) for key in sorted(tree, key=str)]
    if isinstance(tree, list | tuple):
        return type(tree).__name__, [comparable(value, other) for value in tree]
    home = backends.of(tree)
    if home is not None and home.pack(tree) is None:
        try:
            host = home.to_host(tree, None)
        except StateError:
            return other(tree)
        return type(tree).__name__, host.dtype, host.shape, host.data.tobytes()
    plain = isinstance(tree, type(None) | bool | int | float | complex | str | bytes)
    return (type(tree).__name__, repr(tree)) if plain else other(tree)
