"""`MultiRun`: several models on one pass over the data."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from everstep.contracts.data import Cursor, Share, Stream
from everstep.contracts.services import Interrupt
from everstep.data.adapt import describe
from everstep.data.wrappers import StreamWrapper
from everstep.errors import ConfigError, DataError, Interrupted
from everstep.state import capture, isolated, restore
from everstep.supervisor import Ending
from everstep.trainer.eval_ranks import refuse_several
from everstep.trainer.trainer import Trainer
from everstep.trainer.trainer_loop import TrainerLoop


class MultiRun:
    """Several Trainers that train together: each batch is read once, for all of them.

        data = everstep.data.arrays(x, y, batch_size=64, shuffle=True, seed=0)
        small = everstep.Trainer(Digits(8), {"train": data}, "runs/small", max_step=1000, seed=7)
        large = everstep.Trainer(Digits(64), {"train": data}, "runs/large", max_step=1000, seed=7)
        everstep.trainer.MultiRun([small, large]).run_training()

    Each Trainer makes a run of its own, in its own run directory, equal to the bit to a run alone: with its
    own random state, its own copy of each batch, its own evaluations and its own end.  Killed, all of them
    resume; a run behind the others reads alone until it has reached them.  A failed run does not end the
    others.  After tfutils' lists of params.

    Args:
        trainers: one or more, with the same object as stream "train": everstep's own, or a `Stream`; its
            order must be the same for all (a single seed for all, or a seed of its own).

    Raises:
        ConfigError: the Trainers cannot read together.
    """

    def __init__(self, trainers: Iterable[Trainer]) -> None:
        self.trainers: Sequence[Trainer] = list(trainers)
        if not self.trainers or not all(isinstance(each, Trainer) for each in self.trainers):
            raise ConfigError(f"MultiRun({list(self.trainers)!r}): give Trainers")
        self._stream = _shared_by(self.trainers)

    def run_training(self) -> list[Ending]:
        """Train all of them, or continue their training, each until its own limit or stop.

        Raises:
            UsageError: this is one of several processes that train together.
            Interrupted: a signal, or a time budget; all of them are saved.
            Exception: the first failure of a run, raised after the others have ended.
        """
        refuse_several("a MultiRun", "train each model by a Trainer of its own")
        with isolated(), closing(SharedStream(self._stream)) as shared:
            runs = [_Turns(trainer, Tap(shared)) for trainer in self.trainers]
            try:
                while going := [run for run in runs if not run.over]:
                    # the run that is farthest behind in the data: only the last batch has to be kept
                    behind = min(going, key=lambda run: run.tap.place)
                    behind.take()
                    if isinstance(behind.error, Interrupted):
                        for run in going:
                            run.interrupt(behind.error)
            finally:
                for run in runs:
                    run.close()
        _raise(runs)
        return [run.ending for run in runs if run.ending is not None]


class _Turns:
    """The training of one Trainer, a step at a time.

    Attributes:
        over: whether the training has come to its end.
        ending, error: how it ended: one of them is set then.
    """

    def __init__(self, trainer: Trainer, tap: Tap) -> None:
        self.trainer, self.tap = trainer, tap
        self.over = False
        self.ending: Ending | None = None
        self.error: BaseException | None = None
        self._loop: TrainerLoop | None = None
        self._program = trainer.in_turns(tap)
        self._random = capture()

    def take(self) -> None:
        """Train to the end of the next step, with the random state of this run."""
        restore(self._random)
        try:
            self._loop = next(self._program)
        except StopIteration as ended:
            self.over, self.ending = True, ended.value
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.over, self.error = True, error
            if not isinstance(error, Interrupted):
                print(f"{self.trainer.run_dir} failed: {type(error).__name__}: {error}", flush=True)
        finally:
            self._random = capture()

    def interrupt(self, error: Interrupted) -> None:
        """Interrupt the run, too: one that was opened after the signal has not seen it."""
        if not self.over and self._loop is None:
            self.over = True  # not begun
        elif not self.over and self._loop is not None:
            assert isinstance(error.code, int)
            self._loop.call_soon(Interrupt(error.reason, error.code))

    def close(self) -> None:
        """Leave a training that has not come to its end, as by an exception."""
        if not self.over:
            restore(self._random)
            self._program.close()


def _raise(runs: Sequence[_Turns]) -> None:
    """Raise the first failure, else the first interruption, with notes on the others."""
    ended = [run for run in runs if run.error is not None]
    ended.sort(key=lambda run: isinstance(run.error, Interrupted))
    if not ended:
        return
    first = ended[0].error
    assert first is not None
    first.add_note(f"in {ended[0].trainer.run_dir}")
    for run in ended[1:]:
        if not isinstance(run.error, Interrupted):
            first.add_note(f"and in {run.trainer.run_dir}: {type(run.error).__name__}: {run.error}")
    raise first


def _shared_by(trainers: Sequence[Trainer]) -> Stream:
    """Return the stream that all Trainers train on."""
    streams = [trainer.streams.get("train") for trainer in trainers]
    stream = streams[0]
    for each in streams:
        if each is not None and not each.shareable:
            raise ConfigError(
                f"{each!r:.80} keeps its own place, or draws from the random state of the run that reads it: "
                "several runs cannot share it; give everstep.data.arrays(...), loader(...) or another Stream"
            )
    if stream is None or any(each is not stream for each in streams):
        raise ConfigError(
            'the Trainers of a MultiRun read one stream; give each of them the same object as "train" (of a '
            "list of batches everstep.data.as_stream(batches))"
        )
    seeds = [trainer.seed for trainer in trainers]
    described = [None if seed is None else stream.describe(seed) for seed in (*seeds, 0, 1)]
    own_seed = described[-1] is not None and all(each in (None, described[-1]) for each in described)
    if not own_seed and (None in seeds or len(set(seeds)) > 1):
        raise ConfigError(
            f"the order of the data follows from the seed of the run, and the runs have the seeds {seeds}; "
            "give all Trainers one seed, or the stream a seed of its own"
        )
    return stream


# ------------------------------------------------------------------------------------- one reading

Place = tuple[str, int, Any]
"""Purpose, pass, and position in the pass."""


class _Batch(NamedTuple):
    """The batch after a place, the place after it, and what its cursor tells there."""

    before: Place
    batch: Any
    after: Place
    left: int | None
    done: int | None
    passed_over: list[int]
    done_before: int | None


class SharedStream:
    """A stream that several runs read by one cursor, through taps; the batch read last is kept for all.

    A run that stands elsewhere, as after a resume from another step, takes the cursor to its own place.

    Args:
        stream: everstep's own or a user's: which batches come must follow from the seed, the pass and the
            position alone.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._cursor: Cursor | None = None
        self._head: Place | None = None
        """Place of the cursor; None while it is not known."""
        self._last: _Batch | None = None
        self._end: Place | None = None
        """Place at which a pass was found to end."""

    def after(self, place: Place, seed: int) -> _Batch:
        """Return the batch that follows a place."""
        if self._last is not None and place == self._last.before:
            return self._last
        if place == self._end:
            raise StopIteration
        cursor, self._head = self.cursor_at(place, seed), None
        done = cursor.done
        try:
            batch = next(cursor)
        except StopIteration:
            self._end = place
            raise
        self._head = (*place[:2], cursor.position())
        now = cursor.remaining(), cursor.done, cursor.passed_over()
        self._last = _Batch(place, batch, self._head, *now, done)
        return self._last

    def left(self, place: Place, seed: int) -> int | None:
        """Number of batches left in the pass after a place; None if unknown."""
        if self._last is not None and place == self._last.before:
            return None if self._last.left is None else self._last.left + 1
        return 0 if place == self._end else self.cursor_at(place, seed).remaining()

    def done_at(self, place: Place, seed: int) -> int | None:
        """Number of batches handed out before a place; None if unknown."""
        if self._last is not None and place == self._last.before:
            return self._last.done_before
        return self.cursor_at(place, seed).done

    def cursor_at(self, place: Place, seed: int) -> Cursor:
        """Return the cursor, opened anew where it stands neither at a place nor behind its batch."""
        known = self._last is not None and place == self._last.before
        if self._cursor is None or not (known or place == self._head):
            self.close()
            purpose, pass_index, position = place
            self._cursor = self.stream.open(purpose, pass_index, position, seed=seed)
            self._head, self._last = place, None
        return self._cursor

    def close(self) -> None:
        """Close the cursor."""
        if self._cursor is not None:
            self._cursor.close()
        self._cursor = self._head = None


class Tap(StreamWrapper):
    """The shared stream, as one run reads it."""

    def __init__(self, shared: SharedStream) -> None:
        super().__init__(shared.stream)
        self._shared = shared
        self.place = (0, 0)
        """Pass, and number of batches taken from it: how far this run has come."""

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        return _TapCursor(self, self._shared, (purpose, pass_index, position), seed)

    def split(self, share: Share) -> Stream:
        """Return the stream on one rank; refused on several, where each run would need a part of its own."""
        if share.size == 1:
            return self
        raise DataError(
            f"{self.stream!r} is read once for several models, and such a stream cannot be split among "
            f"{share.size} ranks; train each model by a Trainer of its own"
        )

    def describe(self, seed: int) -> dict[str, Any]:
        """Describe the shared stream, which the run would read itself if it were alone."""
        return describe(self.stream, seed)


class _TapCursor(Cursor):
    """A run's pass over a shared stream."""

    def __init__(self, tap: Tap, shared: SharedStream, place: Place, seed: int) -> None:
        self._tap, self._shared, self._place, self._seed = tap, shared, place, seed
        self._opened = shared.cursor_at(place, seed)
        self._passed_over: list[int] = []
        done = shared.done_at(place, seed)
        self._took(done or 0, done is not None)

    def __next__(self) -> Any:
        if self.ended:
            raise StopIteration
        try:
            found = self._shared.after(self._place, self._seed)
        except StopIteration:
            self.ended = True
            raise
        self._place = found.after
        self._passed_over += found.passed_over
        counts = found.done is not None
        self._took(self._tap.place[1] + 1 if found.done is None else found.done, counts)
        return copied(found.batch)  # a copy: the step of one run may change its batch in place

    def _took(self, count: int, counts: bool) -> None:
        self.done = count if counts else None
        self._tap.place = (self._place[1], count)

    def sample_numbers(self, first: int, end: int) -> Sequence[Any] | None:
        return self._opened.sample_numbers(first, end)

    def passed_over(self) -> list[int]:
        found, self._passed_over = self._passed_over, []
        return found

    def position(self) -> Any:
        return self._place[2]

    def remaining(self) -> int | None:
        return 0 if self.ended else self._shared.left(self._place, self._seed)


def copied(batch: Any) -> Any:
    """Copy a batch into memory of its own; arrays keep their strides, because bits can depend on them."""
    kind = type(batch)
    if kind is np.ndarray and not batch.dtype.hasobject:
        return _array(batch)
    if kind in (tuple, list):
        return kind(map(copied, batch))
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return kind._make(map(copied, batch))
    if kind is dict:
        return {name: copied(part) for name, part in batch.items()}
    return copy.deepcopy(batch)


def _array(array: NDArray[Any]) -> NDArray[Any]:
    if not array.size:
        return array.copy()
    spans = [(count - 1) * stride for count, stride in zip(array.shape, array.strides, strict=True)]
    begin = -sum(span for span in spans if span < 0)
    memory = np.empty(begin + sum(span for span in spans if span > 0) + array.itemsize, np.uint8)
    made: NDArray[Any] = np.ndarray(array.shape, array.dtype, memory, begin, array.strides)
    np.copyto(made, array)
    return made
