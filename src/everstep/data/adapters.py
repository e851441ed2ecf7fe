"""Streams over data that users already have: sequences, iterables, and objects that know their own state.

| the data | mid-pass resume |
|---|---|
| a sequence of batches (list, tuple, range) | exact, by index |
| an object with `state_dict`/`load_state_dict` (loaders, HF and streaming datasets) | by its state |
| an iterator with `get_state`/`set_state` or `state_dict`/`load_state_dict` | by the iterator's state |
| `replay(iterable)` | by drawing and discarding, where the user asserts that this is right |
| any other iterable | refused when a position is asked for, with the remedy |
"""

from __future__ import annotations

import copy
import inspect
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from everstep.arguments import checked_keywords
from everstep.contracts.data import Cursor, Share, Stream
from everstep.data.cursor import PassCursor
from everstep.data.other_libraries import (
    begin_anew,
    is_hugging_face,
    ranks_said,
    require_ranks,
    shuffle_buffers,
)
from everstep.errors import DataError, NotResumableError

Accessors: TypeAlias = tuple[Callable[[], Any], Callable[[Any], Any]]

_PAIRS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


def length_of(data: Any) -> int | None:
    """Return `len(data)`, None where the data has no length."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def is_stateful(data: Any) -> bool:
    """Whether data has `state_dict` and `load_state_dict`."""
    return callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))


class OwnStream(Stream):
    """Stream over a user's data; on several ranks the data splits itself, at its word, or is refused."""

    rank_keys = ("state",)
    _data: Any

    def split(self, share: Share) -> Stream:
        if share.size == 1:
            return self
        require_ranks(self._data, share)
        return self

    def _inside(self) -> dict[str, Any]:
        """Describe whose part a place is in, where the data splits itself."""
        said = ranks_said(self._data)
        return {} if said is None or said[1] == 1 else {"inside": {"ranks": said[1]}}


class SequenceStream(OwnStream):
    """Stream over a list, tuple or range of ready batches, handed out as they are."""

    needs_trial = False

    def __init__(self, data: Sequence[Any]) -> None:
        self._data = data

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        return _SequenceCursor(f"data {purpose!r}", self._data, position)

    def describe(self, seed: int) -> dict[str, Any]:
        return {"kind": "sequence", "length": len(self._data), **self._inside()}


class _SequenceCursor(PassCursor):
    def __init__(self, what: str, data: Sequence[Any], position: Any) -> None:
        start = 0 if position is None else position["batches"]
        batches = (data[index] for index in range(start, len(data)))
        super().__init__(what, batches, done=start, total=len(data))

    def position(self) -> dict[str, Any]:
        return {"batches": self.done}


class IterableStream(OwnStream):
    """Stream over any iterable: a fresh iterator for each pass, or the single pass of an iterator."""

    shareable = False

    def __init__(self, data: Iterable[Any], *, replay: bool = False) -> None:
        self._data, self._replay = data, replay
        self.keeps_place = data if isinstance(data, Iterator) else None
        self.unsaveable = None if replay else _unsaveable(data)
        self.needs_trial = not replay and self.keeps_place is None
        self.resumes = "state"
        self._used = False
        self._keeping = self._failed = False
        self._drawn: list[Any] = []
        """Batches of an iterator that are to be drawn again."""

    @property
    def replays(self) -> bool:
        """Whether a resume draws and discards batches to reach its place."""
        return self._replay or self.resumes == "replay"

    @property
    def spent(self) -> bool:  # type: ignore[override]
        """Whether this object cannot be read from an earlier place any more."""
        return self._used and not self._may_rewind()

    @contextmanager
    def drawn_again(self) -> Iterator[None]:
        """Keep the batches that the block draws from an iterator, and draw them again afterwards."""
        if self.keeps_place is None or self._used or self._may_rewind():
            yield
            return
        before, self._keeping = self._keeping, True
        try:
            yield
        finally:
            self._keeping, self._used = before, self._failed

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        what = f"data {purpose!r} ({type(self._data).__name__})"
        done = 0 if position is None else position["batches"]
        if position is not None and position["ended"]:
            return _IterableCursor(what, self._data, iter(()), None, stream=self, done=done, ended=True)
        batches = self._iterate(what, pass_index)
        state = _accessors(batches)
        note = None if not done else self._go_to(what, batches, state, position)
        cursor = _IterableCursor(what, self._data, batches, state, stream=self, done=done)
        cursor.note = note
        return cursor

    def describe(self, seed: int) -> dict[str, Any]:
        return {"kind": "iterable", **self._inside()}

    def _iterate(self, what: str, pass_index: int) -> Iterator[Any]:
        batches: Iterator[Any] = iter(self._data)
        if batches is not self._data:
            return batches
        again = self._used or pass_index > 0
        self._used = True
        if not again:
            return self._drawing_again(batches) if self._keeping or self._drawn else batches
        if self._may_rewind():  # if it has not gone back to its start, the pass is empty: an error then
            return _not_empty(batches, _exhausted(what, pass_index))
        raise _exhausted(what, pass_index)

    def _may_rewind(self) -> bool:
        """Whether the data's class is the user's own: its `__iter__` may go back to the start."""
        return inspect.isfunction(getattr(type(self._data), "__iter__", None))

    def _drawing_again(self, batches: Iterator[Any]) -> Iterator[Any]:
        yield from self._drawn
        try:
            for batch in batches:
                if self._keeping:
                    self._drawn.append(batch)
                yield batch
        except Exception:
            self._failed = True  # the pass that is drawn again would end early
            raise

    def _go_to(self, what: str, batches: Iterator[Any], state: Accessors | None, position: Any) -> str | None:
        if state is not None and position["state"] is not None and self.resumes == "state":
            state[1](copy.deepcopy(position["state"]))
            return None
        if self.replays:
            return skip(what, batches, position["batches"])
        raise DataError(
            f"{what}: the checkpoint stands after {position['batches']} batches, and this iterable "
            "cannot go there; give it as everstep.data.replay(...), as it was given then"
        )


def _unsaveable(data: Any) -> str | None:
    """Say why no run can be saved with a wrapper that hides the data's place; None for other data."""
    kind = type(data)
    if any(cls.__module__.split(".")[0] == "tqdm" for cls in kind.__mro__):
        return (
            "a progress bar hides the place in its data: put it around the loop's steps, as in "
            "tqdm(loop.iter_steps(loader))"
        )
    if kind is zip:
        return (
            "zip hides the places in its data: make one dataset that gives both, as "
            "torch.utils.data.StackDataset does, or draw from several streams of a Supervisor, as in "
            'sv.stream(a, name="a") and sv.stream(b, name="b")'
        )
    if kind in (enumerate, map, filter, itertools.chain, itertools.cycle, itertools.islice):
        return (
            f"{kind.__name__} hides the place in its data: give the data itself, and do in the loop what "
            f"{kind.__name__} does"
        )
    return None


@checked_keywords
def replay(iterable: Iterable[Any]) -> IterableStream:
    """Make a stream over any iterable; you assert that each iteration gives the same batches.

    A resume draws and discards the batches that were handed out before, and prints their number and the time.
    The iterable must not draw from the global random state: give it a generator of its own.

    Args:
        iterable: anything with `__iter__`; a one-shot iterator gives its one pass.
    """
    return IterableStream(iterable, replay=True)


def skip(what: str, batches: Iterator[Any], count: int) -> str:
    """Draw and discard `count` batches.

    Returns:
        A sentence for the user, with the number of batches and the time.

    Raises:
        DataError: the data ends before `count` batches.
    """
    start = time.perf_counter()
    for done in range(count):
        try:
            next(batches)
        except StopIteration:
            raise DataError(
                f"{what}: ended after {done} batches, but the checkpoint stands after {count}; "
                "give the data of that time back, or start a new run"
            ) from None
    return f"{what}: replayed {count} batches in {time.perf_counter() - start:.1f} s"


def _exhausted(what: str, pass_index: int) -> DataError:
    return DataError(
        f"{what}: exhausted: an iterator gives one pass, and pass {pass_index + 1} was to begin; "
        "give a list, or an object whose __iter__ starts anew"
    )


def _not_empty(batches: Iterator[Any], error: DataError) -> Iterator[Any]:
    empty = True
    for batch in batches:
        empty = False
        yield batch
    if empty:
        raise error


def _accessors(owner: Any) -> Accessors | None:
    for getter, setter in _PAIRS:
        get, put = getattr(owner, getter, None), getattr(owner, setter, None)
        if callable(get) and callable(put):
            return get, put
    return None


def _closer(batches: Any, data: Any) -> Callable[[], object] | None:
    """Find how to close an iterator that was made for one pass; the user's own object stays open."""
    return None if batches is data else getattr(batches, "close", None)


class _IterableCursor(PassCursor):
    def __init__(
        self,
        what: str,
        data: Any,
        batches: Iterator[Any],
        state: Accessors | None,
        *,
        stream: IterableStream,
        done: int,
        ended: bool = False,
    ) -> None:
        total, closer = length_of(data), _closer(batches, data)
        super().__init__(what, batches, done=done, total=total, ended=ended, closer=closer)
        self._state, self._stream = state, stream
        self.needs_trial = state is not None

    def position(self) -> dict[str, Any]:
        here = {"kind": "iterable", "batches": self.done, "ended": self.ended, "state": None}
        if self.ended or not self.done:
            return here
        if self._stream.replays:
            return here
        if self._state is not None:
            # A copy: the next batch may change the state in place.
            return {**here, "state": copy.deepcopy(self._state[0]())}
        raise NotResumableError(
            f"{self.what} cannot tell its position after {self.done} batches, so no checkpoint can be made "
            "inside its pass; use everstep.data.arrays or everstep.data.loader, give it "
            "state_dict/load_state_dict, or wrap it as everstep.data.replay(...) if every iteration gives "
            "the same batches"
        )


class StatefulStream(OwnStream):
    """Stream over data that keeps its own position: `state_dict`, `load_state_dict`, and maybe `set_epoch`.

    The state belongs to the object: use a separate object for each purpose.
    """

    shareable = False

    def __init__(self, data: Any) -> None:
        self._data = self.keeps_place = data
        self.holds_state = [] if _is_told(data) else [data]
        self.unhashed_keys = ("state",) if is_hugging_face(data) else ()
        self.resumes = "replay" if shuffle_buffers(data) else "state"

    @property
    def carries_over(self) -> bool:  # type: ignore[override]
        """Whether the next pass depends on the state that this pass leaves behind."""
        return self.resumes == "state" and not is_hugging_face(self._data)

    @contextmanager
    def place_kept(self) -> Iterator[None]:
        """Put the data back to its place after the block, whatever the block draws."""
        before = copy.deepcopy(_state_getter(self._data)(0))
        try:
            yield
        finally:
            self._data.load_state_dict(before)

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        what = f"data {purpose!r} ({type(self._data).__name__})"
        set_epoch = getattr(self._data, "set_epoch", None)
        if callable(set_epoch):  # before the state is loaded, so that the state decides
            set_epoch(pass_index)
        if position is None:
            begin_anew(self._data)
            return _StatefulCursor(what, self, iter(self._data))
        if position["state"] is None or self.resumes == "replay":
            return self._replay(what, position)
        self._data.load_state_dict(copy.deepcopy(position["state"]))
        if position["ended"]:
            if _is_told(self._data):  # the data stands after the last sample, and ends the pass when asked
                next(iter(self._data), None)
            return _StatefulCursor(what, self, iter(()), position)
        batches = iter(self._data)
        if batches is self._data:  # the data's __iter__ may have gone back to the start
            self._data.load_state_dict(copy.deepcopy(position["state"]))
        return _StatefulCursor(what, self, batches, position)

    def _replay(self, what: str, position: Any) -> Cursor:
        done, ended = position["batches"], position["ended"]
        batches = iter(()) if ended else iter(self._data)
        note = None if ended or not done else skip(what, batches, done)
        cursor = _StatefulCursor(what, self, batches, position)
        cursor.note = note
        return cursor

    def describe(self, seed: int) -> dict[str, Any]:
        return {"kind": "stateful", **shuffle_buffers(self._data), **self._inside()}


class _StatefulCursor(PassCursor):
    def __init__(self, what: str, stream: StatefulStream, batches: Iterator[Any], opened: Any = None) -> None:
        data = stream.keeps_place
        total, closer = length_of(data), _closer(batches, data)
        done, ended = (0, False) if opened is None else (opened["batches"], opened["ended"])
        super().__init__(what, batches, done=done, total=total, ended=ended, closer=closer)
        self._stream, self._state = stream, _state_getter(data)
        self._opened = {} if opened is None else opened

    def position(self) -> dict[str, Any]:
        here = {"batches": self.done, "ended": self.ended}
        if self._stream.resumes != "state":
            return {**here, "state": None}
        if here.items() <= self._opened.items():
            # until the next batch, the state_dict of some data tells the start instead of the place
            return {**self._opened}
        return {**here, "state": copy.deepcopy(self._state(self._count))}


def _is_told(data: Any) -> bool:
    """Whether the data's `state_dict` takes the number of samples used (streaming datasets)."""
    try:
        return {"num_samples", "from_beginning"} <= set(inspect.signature(data.state_dict).parameters)
    except (TypeError, ValueError):
        return False


def _state_getter(data: Any) -> Callable[[int], Any]:
    """Return `state_dict` as a function of the number of batches done."""
    if _is_told(data):
        return lambda done: data.state_dict(num_samples=done, from_beginning=True)
    return lambda done: data.state_dict()
