"""Streams over data that users already have: `as_stream` chooses one, and `describe` describes any stream.

| the data | how a resume finds its place inside a pass |
|---|---|
| a `Stream`, a torch `DataLoader` or torchdata's `StatefulDataLoader` | by its own position |
| a list, tuple or range of batches | by its number |
| data whose `state_dict` is known to tell the place, or declared with `stateful(data)` | by that state |
| any other iterable | the pass is begun as it was begun then, and its batches drawn again and discarded |
"""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import GeneratorType
from typing import Any, cast

from everstep.arguments import checked_keywords, valid_name
from everstep.contracts.data import Cursor, Resumes, Share, Stream
from everstep.data.cursor import PassCursor
from everstep.data.other_libraries import (
    begin_anew,
    class_names,
    declared_ranks,
    ends_when_asked,
    is_hugging_face,
    knows_its_place,
    refuse_prepared,
    require_ranks,
    shuffle_buffers,
    takes_count,
)
from everstep.errors import ConfigError, DataError, NotResumableError
from everstep.state import capture, isolated, restore

# By name, so that nothing is imported for data that does not need it.
_LOADER = "torch.utils.data.dataloader.DataLoader"
_LOADER_STREAM = "everstep.backends.torch.user_dataloader"
_STATEFUL = "torchdata.stateful_dataloader.stateful_dataloader.StatefulDataLoader"


def as_stream(data: Any) -> Stream:
    """Make a stream over `data`, by the first of these rules that fits.

    1. A `Stream` is used as it is.
    2. A torch `DataLoader` or torchdata's `StatefulDataLoader` is used as the user made it.
    3. A sequence of batches (list, tuple, range) is resumed by index.
    4. Any other iterable is resumed by drawing its batches again; data of libraries whose state is known to
       tell its place, and what `stateful` declares, by that state.
    """
    if isinstance(data, Stream):
        return data
    # Refused before the adapters, which would use the state_dict of data that cannot tell its position.
    refuse_prepared(data)
    if _is_torchs_loader(data):
        return cast(Stream, importlib.import_module(_LOADER_STREAM).DataLoaderStream(data))
    if (remedy := _refusal(data)) is not None:
        raise DataError(f"{type(data).__name__} {data!r:.60} does not give batches; {remedy}")
    if isinstance(data, Sequence) and not is_stateful(data):
        return SequenceStream(data)
    return IterableStream(data)


@checked_keywords
def stateful(data: Iterable[Any]) -> Stream:
    """Make a stream that reaches its place by the data's own state, at once; you assert that this is right.

    If the state leaves something out (a shuffle buffer, a generator), a resume is not exact.  `everstep
    check` tries it on copies.

    Args:
        data: has `state_dict` and `load_state_dict`; or its iterators have these, or `get_state` and
            `set_state`.
    """
    if _is_torchs_loader(data):
        return as_stream(data)  # the state of a StatefulDataLoader is used anyway, any other has no state
    if not is_stateful(data) and isinstance(data, Iterator):
        accessors(data, f"data ({type(data).__name__})")
    return IterableStream(data, "state")


def named(streams: Any) -> Mapping[str, Any]:
    if not isinstance(streams, Mapping):
        raise ConfigError(
            f"streams is a {type(streams).__name__}; give names to data, as in "
            '{"train": train, "valid": valid}'
        )
    for name in streams:
        valid_name("stream", name)
    return streams


def describe(stream: Stream, seed: int) -> dict[str, Any]:
    """Describe what decides a stream's batches in a run of this seed, as JSON values; at least its type."""
    own = stream.describe(seed)
    return {"kind": stream.kind} if own is None else own


def _is_torchs_loader(data: Any) -> bool:
    names = class_names(data)
    # any other loader with a state knows it, and the adapter would have to guess it
    return _LOADER in names and (_STATEFUL in names or not is_stateful(data))


def _refusal(data: Any) -> str | None:
    """Say what to give instead of an object that Python iterates but that is surely a mistake."""
    if isinstance(data, str | bytes | bytearray | os.PathLike):
        return "give a list of batches, or an object whose __iter__ reads the file"
    if isinstance(data, Mapping):
        return "give its arrays: everstep.data.arrays(*data.values(), batch_size=...)"
    if isinstance(data, type):
        return f"give an object: {data.__name__}(...)"
    if hasattr(data, "shape"):
        return "give everstep.data.arrays(data, batch_size=...), or list(data) if its rows are batches"
    if hasattr(data, "__iter__"):
        return None
    if hasattr(data, "__getitem__"):
        return "give everstep.data.loader(data, batch_size=...), which makes batches of its samples"
    if callable(getattr(data, "open", None)):
        return f"if it is a stream of your own, derive {type(data).__name__} from everstep.data.Stream"
    if callable(data):
        return "call it: give what it returns, if that can be iterated"
    if inside := [name for name, value in getattr(data, "__dict__", {}).items() if _is_torchs_loader(value)]:
        return f"give the DataLoader inside it, its attribute {inside[0]!r}"
    return "give everstep.data.arrays(...), everstep.data.loader(...), a list, or any iterable of batches"


def length_of(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def is_stateful(data: Any) -> bool:
    """Whether data has a state of its own; litdata's lacks the place, which only its loader knows."""
    if not all(callable(getattr(data, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    try:
        inspect.signature(data.state_dict).bind()
    except TypeError:
        return takes_count(data)
    except ValueError:  # written in C, without a signature
        pass
    return True


class UserStream(Stream):
    """Stream over a user's data; on several ranks the data splits itself, as it says, or is refused."""

    rank_keys: Collection[str] = ("state",)
    data: Any

    def split(self, share: Share) -> Stream:
        if share.size > 1:
            require_ranks(self.data, share)
        return self

    def _ranks_inside(self) -> dict[str, Any]:
        """Describe whose part a place is in, where the data splits itself."""
        ranks = declared_ranks(self.data)
        return {} if ranks is None or ranks[1] == 1 else {"inside": {"ranks": ranks[1]}}


class SequenceStream(UserStream):
    """Stream over a list, tuple or range of ready batches, handed out as they are."""

    def __init__(self, data: Sequence[Any]) -> None:
        self.data = data
        self.contents = (data,)

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        data, done = self.data, 0 if position is None else position["batches"]
        batches = (data[index] for index in range(done, len(data)))
        return PassCursor(f"data {purpose!r}", batches, done=done, total=len(data))

    def describe(self, seed: int) -> dict[str, Any]:
        return {"kind": "sequence", "length": len(self.data), **self._ranks_inside()}


class IterableStream(UserStream):
    """Stream over anything that can be iterated over: a fresh iterator for each pass, or an iterator's one.

    Data that resumes by "replay" is brought to where the pass began: `set_epoch`, its own `state_dict` and
    the global random state are as they were there.  Then the batches are drawn again, and the run compares
    them with its ledger.
    """

    rank_keys = ("state", "random")

    def __init__(self, data: Iterable[Any], resumes: Resumes | None = None) -> None:
        self.data: Any = data
        self._stateful = is_stateful(data)
        self.resumes = resumes or ("state" if knows_its_place(data) else "replay")
        self.keeps_place = data if self._stateful or isinstance(data, Iterator) else None
        self.holds_state = [data] if self._stateful and not takes_count(data) else []
        self.unhashed_keys = ("state",) if is_hugging_face(data) else ()
        self.unsaveable = _unsaveable(data) if resumes is None else None
        self.generator = repr(data.__qualname__) if isinstance(data, GeneratorType) else ""
        """Name of a bare generator, in quotes: what it draws at random may follow from the training."""
        self.shuffled = _reads_shuffled(data)
        self._used = self._failed = False

    @property
    def carries_over(self) -> bool:  # type: ignore[override]
        """Whether the next pass depends on the state that this pass leaves behind."""
        return self._stateful and not is_hugging_face(self.data)

    @property
    def spent(self) -> bool:  # type: ignore[override]
        """Whether this object cannot be read from an earlier place any more."""
        return self._used and not self._may_rewind()

    @contextmanager
    def place_kept(self, batches: bool = False) -> Iterator[None]:
        if self._stateful:
            before = self.state_after(0)
            try:
                yield
            finally:
                self.data.load_state_dict(before)
        elif batches and isinstance(self.data, Iterator) and not (self._used or self._may_rewind()):
            self.data, again = itertools.tee(self.data)
            try:
                yield
            finally:
                self.data, self._used = again, self._failed
        else:
            yield

    def state_after(self, done: int) -> Any:
        """Return a copy of the data's state after `done` batches of a pass: the next batch may change it."""
        if takes_count(self.data):
            return self.data.state_dict(num_samples=done, from_beginning=True)
        return copy.deepcopy(self.data.state_dict())

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        what = f"data {purpose!r} ({type(self.data).__name__})"
        set_epoch = getattr(self.data, "set_epoch", None)
        if callable(set_epoch):  # before the state is loaded, so that the state decides
            set_epoch(pass_index)
        begin_anew(self.data)
        if position is None:
            replays = self.resumes == "replay"
            start = {
                "state": self.state_after(0) if replays and self.carries_over else None,
                # the pass may draw its order from the global generators
                "random": capture() if replays else None,
            }
            return _IterableCursor(what, self, self._iterate(what, pass_index), start)
        if self._stateful and position["state"] is not None:
            self.data.load_state_dict(copy.deepcopy(position["state"]))
        if position["ended"]:
            self._end_pass()
            return _IterableCursor(what, self, iter(()), position)
        if self.resumes == "replay":
            return self._replay(what, pass_index, position)
        batches: Any = self._iterate(what, pass_index)
        if self._stateful and batches is self.data:  # its __iter__ may have gone back to the start
            self.data.load_state_dict(copy.deepcopy(position["state"]))
        elif not self._stateful and position["batches"]:
            accessors(batches, what)[1](copy.deepcopy(position["state"]))
        return _IterableCursor(what, self, batches, position)

    def describe(self, seed: int) -> dict[str, Any]:
        kind = "stateful" if self._stateful else "iterable"
        return {"kind": kind, **shuffle_buffers(self.data), **self._ranks_inside()}

    def _end_pass(self) -> None:
        if ends_when_asked(self.data):
            next(iter(self.data), None)

    def _replay(self, what: str, pass_index: int, position: Any) -> Cursor:
        with isolated():
            if pass_index > 0:  # the state is the end of the pass before
                self._end_pass()
            restore(position["random"])
            batches = self._iterate(what, pass_index)
            note = skip(what, batches, position["batches"], self.replayed) if position["batches"] else None
        cursor = _IterableCursor(what, self, batches, position)
        if note and self._stateful and not ends_when_asked(self.data):
            note += "; everstep.data.stateful(data) goes there by its state, if that tells the whole place"
        cursor.note = note
        return cursor

    def _iterate(self, what: str, pass_index: int) -> Iterator[Any]:
        batches: Iterator[Any] = iter(self.data)
        if batches is not self.data or self._stateful:
            return batches
        # the head of an epoch may make a generator for its pass
        is_new = type(batches) is GeneratorType and inspect.getgeneratorstate(batches) == "GEN_CREATED"
        is_again = self._used or (pass_index > 0 and not is_new)
        self._used = True
        if not is_again:
            return self._noting_failure(batches) if isinstance(batches, _Tee) else batches
        if self._may_rewind():  # if it has not gone back to its start, the pass is empty: an error then
            return _not_empty(batches, _exhausted(what, pass_index))
        raise _exhausted(what, pass_index)

    def _may_rewind(self) -> bool:
        """Whether the data's class is the user's own: its `__iter__` may go back to the start."""
        return inspect.isfunction(getattr(type(self.data), "__iter__", None))

    def _noting_failure(self, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from batches
        except Exception:
            self._failed = True  # the pass that is drawn again would end early
            raise


def _reads_shuffled(data: Any, outer: Sequence[Any] = ()) -> bool:
    """Whether a generator names a DataLoader that draws its order from the global generators at each pass.

    The generators `outer` around it are looked at already: one may name another that names it.
    """
    frame = data.gi_frame if isinstance(data, GeneratorType) else None
    if frame is None or any(data is each for each in outer):
        return False
    variables, names = [*frame.f_locals.values()], frame.f_code.co_names
    attributes = [getattr(each, "__dict__", {}).get(name) for each in variables for name in names]
    values = [*variables, *attributes, *map(frame.f_globals.get, names)]
    loaders = [each for each in values if _is_torchs_loader(each)]
    samplers = [s for one in loaders for s in (one.sampler, getattr(one.batch_sampler, "sampler", None))]
    return any(getattr(each, "generator", each) is None for each in samplers if each is not None) or any(
        _reads_shuffled(each, [*outer, data]) for each in values
    )


_Tee: type = type(itertools.tee(())[0])


def _unsaveable(data: Any) -> str | None:
    """Say why no run can be saved with a wrapper that hides the data's place; None for other data."""
    kind = type(data)
    if any(cls.__module__.split(".")[0] == "tqdm" for cls in kind.__mro__):
        remedy = "put it around the loop's steps, as in tqdm(loop.iter_steps(loader))"
    elif kind is zip:
        remedy = "make one dataset that gives both, as torch.utils.data.StackDataset does"
    elif kind in (enumerate, map, filter, itertools.chain, itertools.cycle, itertools.islice):
        remedy = f"give the data itself, and do in the loop what {kind.__name__} does"
    else:
        return None
    return f"{kind.__name__} hides the place in its data: {remedy}"


@checked_keywords
def replay(iterable: Iterable[Any]) -> IterableStream:
    """Make a stream that reaches its place by drawing and discarding, whatever state the data has.

    Anything without a known state is read like this anyway.  Here wrappers are taken, too, whose data a run
    would refuse (`zip`, `tqdm` ...): you assert that a new process iterates over the same batches.

    Args:
        iterable: anything with `__iter__`; a one-shot iterator gives its one pass.
    """
    return IterableStream(iterable, "replay")


def skip(
    what: str, batches: Iterator[Any], count: int, replayed: Callable[[Any], object] | None = None
) -> str:
    """Draw and discard `count` batches, each handed to `replayed`; returns a sentence for the user."""
    start = time.perf_counter()
    for done in range(count):
        try:
            batch = next(batches)
        except StopIteration:
            raise DataError(
                f"{what}: ended after {done} batches, but the checkpoint is after {count}; "
                "give the same data again, or start a new run"
            ) from None
        if replayed is not None:
            replayed(batch)
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


def accessors(batches: Any, what: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return the functions that get and set an iterator's state."""
    if hasattr(batches, "get_state") and hasattr(batches, "set_state"):
        return batches.get_state, batches.set_state
    if is_stateful(batches):
        return batches.state_dict, batches.load_state_dict
    raise NotResumableError(
        f"{what} has neither state_dict and load_state_dict nor iterators with a state; give it without "
        "everstep.data.stateful: a resume then draws its batches again"
    )


class _IterableCursor(PassCursor):
    """Pass over an iterable, opened at a position; at its start that has "state" and "random" alone."""

    def __init__(self, what: str, stream: IterableStream, batches: Iterator[Any], opened_at: Any) -> None:
        data = stream.data
        # the user's own object stays open
        closer = None if batches is data else getattr(batches, "close", None)
        done, ended = opened_at.get("batches", 0), opened_at.get("ended", False)
        super().__init__(what, batches, done=done, total=length_of(data), ended=ended, closer=closer)
        self._stream, self._opened_at, self._iterator = stream, opened_at, batches

    def position(self) -> dict[str, Any]:
        stream, opened_at = self._stream, self._opened_at
        place = {"batches": self.done, "ended": self.ended}
        if place.items() <= opened_at.items():
            # until the next batch, the state_dict of some data tells the start instead of the place
            return {**opened_at}
        if stream.resumes == "replay" and not self.ended:
            return {**opened_at, **place}
        state = None
        if stream.carries_over or (stream._stateful and not self.ended):
            state = stream.state_after(self._handed_out)
        elif not self.ended and not stream._stateful:
            get, _ = accessors(self._iterator, self.what)
            state = copy.deepcopy(get()) if self._handed_out else None
        return {**place, "state": state, "random": None}  # where a replay would begin no longer matters
