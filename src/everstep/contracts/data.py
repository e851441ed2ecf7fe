"""Data: a `Stream` describes it, a `Cursor` is one pass over it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable


class Cursor(Protocol):
    """An iterator over one pass of a stream.  Not shared, not restarted.

    It may have an attribute `done`: the batches handed out since the start of the pass, also where the
    cursor was opened at a position.  `Recovery` names a batch by it, and refuses a cursor that has none.
    """

    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any:
        """The next batch; `StopIteration` at the end of the pass, also when asked again."""

    def position(self) -> Any:
        """Where the pass stands after the batches handed out so far (prefetched ones do not count).

        A tree that the checkpoint can hold.  Called between batches, not per batch.

        Raises:
            NotResumableError: the data cannot tell; says how to make it able to.
        """

    def remaining(self) -> int | None:
        """How many batches are left in this pass, None if unknown."""

    def close(self) -> None:
        """Stop workers and threads.  May be called twice."""


@runtime_checkable
class Stream(Protocol):
    """An immutable, named description of data; each pass over it is a cursor.

    It may have a method `describe(seed)` that returns what decides which batches come in a run of this
    seed, as a dictionary of JSON values ("kind", "length", "batch_size" ...).  The checkpoint keeps it,
    and data that is described otherwise is refused at the resume.  What counts only for going on inside
    a pass stands under the key "inside", a dictionary; what only changes speed does not belong there.

    Where something else than the cursor knows the place in the data, attribute `keeps_place` is that
    object: it cannot be trained on and evaluated at once.

    A method `sample_ids(purpose, pass_index, index, *, seed)` gives the numbers of a batch's samples.

    Our own have more, all of it optional: `generators` that it draws from; `carries_over`: the next pass
    depends on where this one leaves the data; `may_be_empty`: a pass without a batch is no error;
    `holds_state`: objects that tell their place at any time; the contexts `place_kept()` and
    `drawn_again()`, after which the data stands where it stood, or what was drawn comes again; `spent`:
    this object cannot be read from an earlier place any more; `unsaveable`: why no run can be saved while
    it reads this, and the remedy, in words, or None; `on_word`: whether its state is taken at its word,
    which is tried; `resumes`: "state", or "replay" where batches are drawn and discarded;
    `end_workers()`; `no_thread`: why no other thread may draw, in words.
    """

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
