"""Base classes of data: a `Stream` describes data, a `Cursor` is one pass over it.

Members that you do not override have the defaults written here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias, get_args

from everstep.errors import ConfigError, DataError, nearest

Resumes: TypeAlias = Literal["state", "replay"]
"""Way in which data reaches a place inside a pass: by its state, or by drawing and discarding batches."""

Uneven: TypeAlias = Literal["weight", "drop", "pad"]
"""Rule for batches whose samples the number of ranks does not divide; see `Share`."""


@dataclass(frozen=True)
class Share:
    """A rank's part of each batch, among the ranks that train together.

    The parts of a batch are contiguous, in the order of ranks; of n samples the first n % `size` ranks have
    one more than the others.

    Attributes:
        rank: number of the rank, 0 to `size` - 1.
        size: number of ranks, 1 or more.
        uneven: rule for a batch that `size` does not divide.  None: an error.  "weight": the parts differ by
            one sample, and `Cursor.weight` makes the mean over ranks the mean over the batch.  "drop": the
            batch's last n % `size` samples are left out.  "pad": as "weight", and a rank without a sample is
            handed the batch's last sample with weight 0; for evaluations.
    """

    rank: int = 0
    size: int = 1
    uneven: Uneven | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank={self.rank}, size={self.size}: give a rank from 0 to size - 1")
        if self.uneven is not None and self.uneven not in get_args(Uneven):
            raise ConfigError(f"uneven={self.uneven!r}: give one; {nearest(self.uneven, get_args(Uneven))}")

    def of(self, count: int) -> tuple[range, float]:
        """Return the places of this rank's samples in a batch of `count`, and the weight of their mean."""
        shared = count - count % self.size if self.uneven == "drop" else count
        each, more = divmod(shared, self.size)
        first = self.rank * each + min(self.rank, more)
        own = range(first, first + each + (self.rank < more))
        if own:
            return own, len(own) * self.size / shared
        return range(count - 1, count), 0.0

    def leaves_out(self, count: int) -> bool:
        """Whether no rank is handed anything of a batch of `count` samples."""
        return self.uneven == "drop" and count < self.size

    def require(self, count: int, what: str) -> None:
        """Require that a batch of `count` samples can be split by the rule."""
        if self.uneven is None and count % self.size:
            raise DataError(
                f"{what}: a batch of {count} samples does not divide among {self.size} ranks, so the mean "
                'over ranks is not the mean over the batch; give uneven="weight" and multiply the loss by '
                'batch_weight, or uneven="drop" to leave out the last samples of such a batch, or '
                f"drop_last=True, with a batch size of all ranks together that {self.size} divides"
            )
        if self.uneven == "weight" and count < self.size:
            raise DataError(
                f"{what}: a batch of {count} samples has none for some of {self.size} ranks; give "
                'drop_last=True where this is the last batch, or uneven="drop", or a larger batch size'
            )


WHOLE = Share()
"""Share of the only rank: each batch as a whole."""


class Cursor(ABC):
    """Iterator over one pass of a stream, with one reader.  It is never restarted.

    Attributes:
        done: batches handed out since the start of the pass, also where the cursor was opened at a
            position; None where the cursor does not count.  `Recovery` names a batch by this number, and
            refuses None.
        note: a sentence to print after opening (what the opening cost), or None.
        fetch_error_may_be_signal: whether an error while fetching may come from a signal to a worker.
        skipped: batches of this pass that were passed over.
        may_differ: whether batches that `open` drew again may rightly differ from the run's: both they and
            the steps in between have drawn from one random state.
        weight: factor for the mean over the batch handed out last.  With it the mean over ranks is the mean
            over the batch as a whole; 1.0 on one process, 0.0 for a batch that is padding.
    """

    done: int | None = None
    note: str | None = None
    fetch_error_may_be_signal: bool = False
    skipped: int = 0
    may_differ: bool = False
    weight: float = 1.0

    def __iter__(self) -> Iterator[Any]:
        return self

    @abstractmethod
    def __next__(self) -> Any:
        """Return the next batch; raise `StopIteration` at the end of the pass, also when asked again."""

    @abstractmethod
    def position(self) -> Any:
        """Return the place in the pass after the batches handed out so far (not the prefetched batches).

        The place is the same however it was reached: dicts, lists, tuples, sets, numbers, text, bytes, None
        and arrays, in any nesting, as a copy that no later batch changes.  Called between batches, not per
        batch.

        Raises:
            NotResumableError: the data cannot tell its place: no run can train on it; says what to change.
        """

    def remaining(self) -> int | None:
        """Return the number of batches left in this pass, None if unknown.

        By this number a loop knows which step is the last of an epoch, and saves before that step, so that a
        resume in the epoch's tail runs the step again: names that the loop assigns exist in the tail.
        """
        return None

    def sample_numbers(self, first: int, end: int) -> Sequence[Any] | None:
        """Return the numbers of the samples in batches `first` to `end` - 1 of this pass, for the ledger.

        Returns:
            For each batch, what all ranks together are handed of it: int64, shape (samples,), contiguous.
            None where the cursor does not know them.
        """
        return None

    def passed_over(self) -> list[int]:
        """Return the numbers of the batches that were passed over since the last call, from 0, ascending."""
        return []

    def close(self) -> None:  # noqa: B027
        """Stop workers and threads.  May be called twice."""


class Stream(ABC):
    """Immutable, named description of data; each pass over the data is a cursor.

    Attributes:
        generators: generators of random numbers that the stream draws from.
        holds_state: objects that tell their place at any time.
        keeps_place: the object that knows the place in the data, where the cursor does not; such data cannot
            be trained on and evaluated at once.
        carries_over: whether the next pass depends on where this pass leaves the data.
        may_be_empty: whether a pass may have no batch.
        spent: whether this object cannot be read from an earlier place any more.
        unsaveable: why no run can be saved while it reads this stream, and the remedy; None where a run can.
        replayed: called with each batch that `open` draws again to reach a place, from the start of the pass
            on, in order; set by the run, which compares them.
        contents: objects that hold the data's arrays; a resume compares these with the checkpoint's.
        resumes: how the stream reaches a place inside a pass; None: by its cursor's position, with no other
            way.
        unhashed_keys: keys of positions that also say how a place was reached; these keys are saved, but are
            not part of the run's digest.
        no_thread: why no other thread may draw from the stream, in words; None where a thread may.
        rank_keys: keys of positions whose values are a rank's own; what is under other keys is the same on
            all ranks.
    """

    generators: Sequence[Any] = ()
    holds_state: Sequence[Any] = ()
    keeps_place: Any = None
    carries_over: bool = False
    may_be_empty: bool = False
    spent: bool = False
    unsaveable: str | None = None
    replayed: Callable[[Any], object] | None = None
    contents: Sequence[Any] = ()
    resumes: Resumes | None = None
    unhashed_keys: Collection[str] = ()
    no_thread: str | None = None
    rank_keys: Collection[str] = ()

    @abstractmethod
    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        """Open one pass.

        Args:
            purpose: in a run, the stream's name ("train", "valid" ...); keys randomness.
            pass_index: number of the pass over the data, from 0.
            position: None for the pass's start, else a result of `Cursor.position`.
            seed: the run's seed; a stream with a seed of its own ignores this seed.

        Raises:
            DataError: the position does not fit the data (whose length may have changed since).
        """

    def describe(self, seed: int) -> dict[str, Any] | None:
        """Describe what decides the batches in a run of this seed; None: no description.

        JSON values by name ("kind", "length", "batch_size" ...).  The checkpoint keeps them, and at a
        resume, data with another description is an error.  Values that count only inside a pass are under
        the key "inside", a dictionary.  Settings that only change speed do not belong in the description.
        """
        return None

    @property
    def kind(self) -> str:
        """Name of the stream's type, for a stream without a description."""
        return type(self).__qualname__

    @property
    def source(self) -> Self | Stream:
        """Stream that reads the data: this stream, or the stream inside it."""
        return self

    def sample_ids(self, purpose: str, pass_index: int, index: int, *, seed: int) -> list[int] | None:
        """Return the numbers of the samples in one batch of a pass; None where the stream cannot tell."""
        return None

    def split(self, share: Share) -> Stream:
        """Return the stream of one rank's part of each batch.

        Passes, positions and the description are those of the stream as a whole, so a position that was
        taken with one number of ranks opens with any other.
        """
        if share.size == 1:
            return self
        raise DataError(
            f"a {self.kind} cannot be split: each of {share.size} ranks would be handed the same batches; "
            "use everstep.data.arrays, everstep.data.loader or a DataLoader with a DistributedSampler, or "
            "give the stream a method split(share)"
        )

    def of_other_ranks(self, what: str, saved: Sequence[Any], key: int) -> Any:
        """Return this rank's value of a position, from those of another number of ranks.

        Args:
            what: one of `rank_keys`.
            saved: the saved values, in the order of ranks; a single value where all of them were equal.
            key: 64-bit key of the run, the stream and the pass, to make random state from; the same on all
                ranks.
        """
        if len(saved) > 1:
            raise DataError(
                f"its {what!r} was another on each rank, and a {self.kind} cannot make that of another "
                "number of ranks"
            )
        return saved[0]

    def updated_end(self, end: Any) -> Any:
        """Return `end`, the last position of a pass, with what the program has changed of the data since."""
        return end

    def place_kept(self, batches: bool = False) -> AbstractContextManager[object]:
        """Return a context that puts the data back to its place, whatever the block draws.

        Args:
            batches: whether to keep what the block draws from an iterator in memory, so that it comes again.
        """
        return nullcontext()

    def end_workers(self) -> None:  # noqa: B027
        """End worker processes that stay from pass to pass; the next pass starts new ones."""
