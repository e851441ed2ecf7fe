"""`MultiRun`: several models on one pass over the data."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import numpy as np

from everstep.contracts.data import Cursor, Stream
from everstep.contracts.services import Interrupt
from everstep.data.adapt import describe
from everstep.data.cursor import StreamWrapper
from everstep.errors import ConfigError, Interrupted
from everstep.state import capture, isolated, restore
from everstep.supervisor import Ending
from everstep.trainer.eval_loop import refuse_several
from everstep.trainer.trainer import Trainer
from everstep.trainer.trainer_loop import TrainerLoop


class MultiRun:
    """Several Trainers that train together: each batch is read once, for all of them.

        data = everstep.data.arrays(x, y, batch_size=64, shuffle=True, seed=0)
        small = everstep.Trainer(Digits(8), {"train": data}, "runs/small", max_step=1000, seed=7)
        large = everstep.Trainer(Digits(64), {"train": data}, "runs/large", max_step=1000, seed=7)
        everstep.trainer.MultiRun([small, large]).run_training()

    Each Trainer makes a run of its own, equal to the bit to a run alone.  Killed, all of them resume; a run
    behind the others reads alone until it has reached them.  A failed run does not end the others.

    Args:
        trainers: one or more, with the same object as stream "train": everstep's own, or a `Stream`; its
            order must be the same for all (a single seed for all, or a seed of its own).
    """

    def __init__(self, trainers: Iterable[Trainer]) -> None:
        self.trainers: Sequence[Trainer] = list(trainers)
        if not self.trainers or not all(isinstance(each, Trainer) for each in self.trainers):
            raise ConfigError(f"MultiRun({list(self.trainers)!r}): give Trainers")
        stream = self.trainers[0].streams.get("train")
        if stream is None or any(each.streams.get("train") is not stream for each in self.trainers):
            raise ConfigError(
                'the Trainers of a MultiRun read one stream; give each of them the same object as "train"'
            )
        # seed, pass and position alone have to decide the batches
        if stream.keeps_place is not None or stream.resumes is not None:
            raise ConfigError(
                f"several runs cannot share {stream!r:.80}; give everstep.data.arrays(...) or loader(...)"
            )
        seeds, described = [trainer.seed for trainer in self.trainers], stream.describe(0)
        own_seed = described is not None and described == stream.describe(1)
        if not own_seed and (None in seeds or len(set(seeds)) > 1):
            remedy = "give all Trainers one seed, or the stream one of its own"
            raise ConfigError(f"the runs have the seeds {seeds}; {remedy}")
        self._stream = stream

    def run_training(self) -> list[Ending]:
        """Train all of them, or continue their training, each until its own limit or stop.

        Raises:
            Interrupted: a signal, or a time budget; all of them are saved.
            Exception: the first failure of a run, raised after the others have ended.
        """
        refuse_several("a MultiRun", "train each model by a Trainer of its own")
        endings, errors = dict[_Training, Ending](), list[BaseException]()
        with isolated(), closing(SharedStream(self._stream)) as shared, ExitStack() as stack:
            runs = [stack.enter_context(closing(_Training(each, shared))) for each in self.trainers]
            going = list(runs)
            while going:
                # the run that is farthest behind in the data: only the last batch has to be kept
                run = min(going, key=lambda run: run.place)
                try:
                    run.step()
                    continue
                except StopIteration as stop:
                    endings[run] = stop.value
                except Interrupted as error:
                    errors.append(error)
                    going = [each for each in going if each is run or each.interrupt(error)]
                except Exception as error:
                    error.add_note(f"in {run.run_dir}")
                    print(f"{run.run_dir} failed: {type(error).__name__}: {error}", flush=True)
                    errors.append(error)
                going.remove(run)
        if errors:
            raise min(errors, key=lambda error: isinstance(error, Interrupted))
        return [endings[run] for run in runs]


class _Training:
    """The training of one Trainer, a step at a time, with a random state of its own."""

    def __init__(self, trainer: Trainer, shared: SharedStream) -> None:
        self.run_dir, self._shared = trainer.run_dir, shared
        self.place = (0, 0)
        """Pass, and number of its batches that the run has read."""
        self._loop: TrainerLoop | None = None
        self._steps, self._random = trainer.in_turns(shared), capture()

    def step(self) -> None:
        """Run the next step; raise `StopIteration`, with the `Ending`, if there is none."""
        restore(self._random)
        try:
            self._loop, self.place = next(self._steps), self._shared.place
        finally:
            self._random = capture()

    def interrupt(self, error: Interrupted) -> bool:
        """Interrupt the run if it was begun: one that was opened after the signal has not seen it."""
        if self._loop is not None:
            assert isinstance(error.code, int)
            self._loop.call_soon(Interrupt(error.reason, error.code))
        return self._loop is not None

    def close(self) -> None:
        """Leave a training that has not come to its end, as by an exception."""
        restore(self._random)
        self._steps.close()


_END: Any = object()
"""Takes the place of the batch after a pass."""


class _Place(NamedTuple):
    """Place in the data (purpose, pass, position in the pass or None), and what the cursor tells there."""

    at: tuple[str, int, Any]
    done: int | None
    left: int | None
    passed_over: Sequence[int] = ()
    batch: Any = _END
    """The batch before the place."""


class SharedStream(StreamWrapper):
    """A stream that several runs read by one cursor; the batch read last is kept for all.

    A run that stands elsewhere, as after a resume from another step, takes the cursor to its own place.
    """

    place = (0, 0)
    """Pass, and number of its batches, at which the run stands that has read last."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self.cursor: Cursor | None = None
        self._known: list[_Place] = []
        """Places before and after the batch read last; the cursor stands at the last place."""
        self._end: tuple[tuple[str, int, Any], _Place] | None = None
        """Place after which a pass was found to end, and that of the end, for runs that are not yet there."""

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        return _SharedCursor(self, (purpose, pass_index, position), seed)

    def describe(self, seed: int) -> dict[str, Any]:
        """Describe the stream inside, which the run would read itself if it were alone."""
        return describe(self.stream, seed)

    def find(self, at: tuple[str, int, Any], seed: int) -> _Place:
        """Return a place; the cursor goes there unless the place is known."""
        for place in self._known:
            if place.at == at:
                return place
        self.close()
        self.cursor = self.stream.open(*at, seed=seed)
        self._known = [_Place(at, self.cursor.done, self.cursor.remaining())]
        return self._known[0]

    def read(self, at: tuple[str, int, Any], seed: int) -> _Place:
        """Return the place after the next batch from a place, or that of the pass's end."""
        if self._end is not None and self._end[0] == at:
            return self._end[1]
        place = self.find(at, seed)
        if place is self._known[-1]:
            cursor, self._known = self.cursor, []  # no place is known if the next line fails
            assert cursor is not None
            batch = next(cursor, _END)
            now = (*at[:2], cursor.position())
            following = _Place(now, cursor.done, cursor.remaining(), cursor.passed_over(), batch)
            if batch is _END:
                self._end = at, following._replace(left=0)
                return self._end[1]
            self._known = [place._replace(batch=None), following]
        return self._known[-1]

    def close(self) -> None:
        if self.cursor is not None:
            self.cursor.close()
        self.cursor, self._known = None, []


class _SharedCursor(Cursor):
    def __init__(self, shared: SharedStream, at: tuple[str, int, Any], seed: int) -> None:
        self._shared, self._seed = shared, seed
        self._passed_over: list[int] = []
        self._move(shared.find(at, seed), 0)
        assert shared.cursor is not None
        self.sample_numbers = shared.cursor.sample_numbers  # type: ignore[method-assign]

    def _move(self, place: _Place, count: int) -> None:
        self._at, self.done, self._left = place.at, place.done, place.left
        self._count = count if place.done is None else place.done
        self._shared.place = place.at[1], self._count

    def __next__(self) -> Any:
        place = self._shared.read(self._at, self._seed)
        self._move(place, self._count + 1)
        self._passed_over += place.passed_over
        if place.batch is _END:
            raise StopIteration
        return copy_batch(place.batch)  # the step of one run may change its batch in place

    def passed_over(self) -> list[int]:
        batches, self._passed_over = self._passed_over, []
        return batches

    def position(self) -> Any:
        return self._at[2]

    def remaining(self) -> int | None:
        return self._left


def copy_batch(batch: Any) -> Any:
    """Copy a batch into memory of its own; arrays keep their strides, because bits can depend on them."""
    kind = type(batch)
    if kind is np.ndarray and batch.size and not batch.dtype.hasobject:
        spans = [(count - 1) * stride for count, stride in zip(batch.shape, batch.strides, strict=True)]
        begin = -sum(span for span in spans if span < 0)
        memory = np.empty(begin + sum(span for span in spans if span > 0) + batch.itemsize, np.uint8)
        array: Any = np.ndarray(batch.shape, batch.dtype, memory, begin, batch.strides)
        np.copyto(array, batch)
        return array
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return kind._make(map(copy_batch, batch))
    if kind in (tuple, list):
        return kind(map(copy_batch, batch))
    if kind is dict:
        return {name: copy_batch(part) for name, part in batch.items()}
    return copy.deepcopy(batch)
