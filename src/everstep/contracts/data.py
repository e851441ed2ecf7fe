"""Data: a `Stream` describes it, a `Cursor` is one pass over it.

Both are base classes: what you do not override has the default that is written here.  An object with the
methods alone is taken, too (`everstep.data.as_stream`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Self, TypeAlias

Resumes: TypeAlias = Literal["state", "replay"]
"""How data reaches a place inside a pass: by its state, or by drawing and discarding batches."""


class Cursor(ABC):
    """An iterator over one pass of a stream.  Not shared, not restarted.

    Attributes:
        done: batches handed out since the start of the pass, also where the cursor was opened at a
            position; None where it does not count.  `Recovery` names a batch by it, and refuses None.
        ended: the pass is over: `StopIteration` was seen.
        note: a sentence to print after opening (what the opening cost), or None.
        first_took: seconds that the first batch took; None before it, and where nobody measured.
        on_word: whether its position is the data's own word, which is tried.
        fetch_error_may_be_signal: whether an error while fetching may come from a signal to a worker.
        skipped: batches of this pass that were passed over.
    """

    done: int | None = None
    ended: bool = False
    note: str | None = None
    first_took: float | None = None
    on_word: bool = True
    fetch_error_may_be_signal: bool = False
    skipped: int = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    @abstractmethod
    def __next__(self) -> Any:
        """The next batch; `StopIteration` at the end of the pass, also when asked again."""

    @abstractmethod
    def position(self) -> Any:
        """Where the pass stands after the batches handed out so far (prefetched ones do not count).

        A tree that the checkpoint can hold: a function of the place, however it was reached.  Called
        between batches, not per batch.

        Raises:
            NotResumableError: the data cannot tell; says how to make it able to.
        """

    def remaining(self) -> int | None:
        """How many batches are left in this pass, None if unknown."""
        return None

    def close(self) -> None:  # noqa: B027
        """Stop workers and threads.  May be called twice."""


class Stream(ABC):
    """An immutable, named description of data; each pass over it is a cursor.

    Attributes:
        generators: generators of random numbers that it draws from.
        holds_state: objects that tell their place at any time.
        keeps_place: the object that knows the place in the data, where the cursor does not: it cannot be
            trained on and evaluated at once.
        carries_over: whether the next pass depends on where this one leaves the data.
        may_be_empty: whether a pass without a batch is no error.
        spent: whether this object cannot be read from an earlier place any more.
        unsaveable: why no run can be saved while it reads this, and the remedy; None where one can.
        on_word: whether its state is taken at its word, which is tried.
        resumes: how it reaches a place inside a pass; None: by what its cursor says, with no other way.
        place_words: keys of its positions that say how a place was reached, too: they are saved, and are no
            part of the run's digest.
        no_thread: why no other thread may draw from it, in words; None where one may.
    """

    generators: Sequence[Any] = ()
    holds_state: Sequence[Any] = ()
    keeps_place: Any = None
    carries_over: bool = False
    may_be_empty: bool = False
    spent: bool = False
    unsaveable: str | None = None
    on_word: bool = True
    resumes: Resumes | None = None
    place_words: Collection[str] = ()
    no_thread: str | None = None

    @abstractmethod
    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        """Open one pass.

        Args:
            purpose: the name under which the loop uses it ("train", "valid" ...); keys randomness.
            pass_index: which pass over the data this is, from 0.
            position: None for the pass's start, else what `Cursor.position` returned.
            seed: the run's seed; a stream with a seed of its own ignores it.

        Raises:
            DataError: the position does not fit the data (it changed its length since).
        """

    def describe(self, seed: int) -> dict[str, Any] | None:
        """What decides which batches come in a run of this seed; None: it does not say.

        JSON values by name ("kind", "length", "batch_size" ...).  The checkpoint keeps them, and data that is
        described otherwise is refused at the resume.  What counts only for going on inside a pass stands
        under the key "inside", a dictionary; what only changes speed does not belong there.
        """
        return None

    @property
    def kind(self) -> str:
        """What it is, for one that does not describe itself."""
        return type(self).__qualname__

    @property
    def source(self) -> Self | Stream:
        """The stream that reads the data: this one, or the one inside it."""
        return self

    @property
    def shareable(self) -> bool:
        """Whether several runs can read it: batches follow from the seed, the pass and the position alone."""
        return self.keeps_place is None

    def sample_ids(self, purpose: str, pass_index: int, index: int, *, seed: int) -> list[int] | None:
        """The numbers of the samples in one batch of a pass; None where it cannot tell."""
        return None

    def place_kept(self) -> AbstractContextManager[object]:
        """A context after which the data stands where it stood, whatever the block draws."""
        return nullcontext()

    def drawn_again(self) -> AbstractContextManager[object]:
        """A context after which what the block draws comes again."""
        return nullcontext()

    def end_workers(self) -> None:  # noqa: B027
        """End worker processes that stay from pass to pass; the next pass starts others."""
