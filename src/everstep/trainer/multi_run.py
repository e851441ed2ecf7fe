"""`MultiRun`: several models on one pass over the data."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np

from everstep.contracts.data import Cursor, Share, Stream
from everstep.contracts.services import Interrupt
from everstep.data.adapt import describe
from everstep.data.cursor import StreamWrapper
from everstep.errors import ConfigError, Interrupted
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
        if not stream.shareable:
            raise ConfigError(
                f"several runs cannot share {stream!r:.80}; give everstep.data.arrays(...) or loader(...)"
            )
        seeds = [trainer.seed for trainer in self.trainers]
        described = [None if seed is None else stream.describe(seed) for seed in (*seeds, 0, 1)]
        own_seed = described[-1] is not None and all(each in (None, described[-1]) for each in described)
        if not own_seed and (None in seeds or len(set(seeds)) > 1):
            raise ConfigError(
                f"the runs have the seeds {seeds}; give all Trainers one seed, or the stream one of its own"
            )
        self._stream = stream

    def run_training(self) -> list[Ending]:
        """Train all of them, or continue their training, each until its own limit or stop.

        Raises:
            Interrupted: a signal, or a time budget; all of them are saved.
            Exception: the first failure of a run, raised after the others have ended.
        """
        refuse_several("a MultiRun", "train each model by a Trainer of its own")
        with isolated(), closing(SharedStream(self._stream)) as reading:
            runs = [_Training(trainer, reading) for trainer in self.trainers]
            try:
                while going := [run for run in runs if not run.over]:
                    # the run that is farthest behind in the data: only the last batch has to be kept
                    behind = min(going, key=lambda run: run.place)
                    behind.step()
                    if isinstance(behind.error, Interrupted):
                        for run in going:
                            run.interrupt(behind.error)
            finally:
                for run in runs:
                    run.close()
        if errors := [run.error for run in runs if run.error is not None]:
            raise min(errors, key=lambda error: isinstance(error, Interrupted))
        return [run.ending for run in runs if run.ending is not None]


class _Training:
    """The training of one Trainer, a step at a time, with a random state of its own."""

    def __init__(self, trainer: Trainer, reading: SharedStream) -> None:
        self.trainer, self._reading = trainer, reading
        self.place = (0, 0)
        """Pass, and number of its batches that the run has read."""
        self.over = False
        self.ending: Ending | None = None
        self.error: BaseException | None = None
        self._loop: TrainerLoop | None = None
        self._steps = trainer.in_turns(reading)
        self._random = capture()

    def step(self) -> None:
        restore(self._random)
        try:
            self._loop, self.place = next(self._steps), self._reading.place
        except StopIteration as ended:
            self.over, self.ending = True, ended.value
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.over, self.error = True, error
            if not isinstance(error, Interrupted):
                error.add_note(f"in {self.trainer.run_dir}")
                print(f"{self.trainer.run_dir} failed: {type(error).__name__}: {error}", flush=True)
        finally:
            self._random = capture()

    def interrupt(self, error: Interrupted) -> None:
        """Interrupt the run, too: one that was opened after the signal has not seen it."""
        if self._loop is None:
            self.over = True  # not begun
        elif not self.over:
            assert isinstance(error.code, int)
            self._loop.call_soon(Interrupt(error.reason, error.code))

    def close(self) -> None:
        """Leave a training that has not come to its end, as by an exception."""
        restore(self._random)
        self._steps.close()


class _Place(NamedTuple):
    """Place in the data (purpose, pass, position in the pass or None), and what the cursor tells there."""

    at: tuple[str, int, Any]
    done: int | None
    left: int | None
    passed_over: Sequence[int] = ()


class SharedStream(StreamWrapper):
    """A stream that several runs read by one cursor; the batch read last is kept for all.

    A run that stands elsewhere, as after a resume from another step, takes the cursor to its own place.
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self.place = (0, 0)
        """Pass, and number of its batches, at which the run stands that has read last."""
        self.cursor: Cursor | None = None
        self._batch: Any = None
        self._before: _Place | None = None
        """Place before the batch read last."""
        self._here: _Place | None = None
        """Place of the cursor."""
        self._end: tuple[str, int, Any] | None = None
        """Place at which a pass was found to end."""

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        return _SharedCursor(self, (purpose, pass_index, position), seed)

    def split(self, share: Share) -> Stream:
        return self  # a MultiRun refuses several ranks

    def describe(self, seed: int) -> dict[str, Any]:
        """Describe the stream inside, which the run would read itself if it were alone."""
        return describe(self.stream, seed)

    def go_to(self, at: tuple[str, int, Any], seed: int) -> _Place:
        """Return a place; the cursor goes there unless the place is known."""
        for known in (self._before, self._here):
            if known is not None and known.at == at:
                return known
        self.close()
        self.cursor = self.stream.open(*at, seed=seed)
        self._here = _Place(at, self.cursor.done, self.cursor.remaining())
        return self._here

    def after(self, place: _Place, seed: int) -> tuple[Any, _Place] | None:
        """Return the batch after a place, and the place after the batch; None at the end of the pass."""
        if self._end == place.at:
            return None
        if self._before is None or self._before.at != place.at:
            self.go_to(place.at, seed)
            cursor, self._here = self.cursor, None  # not known if the next line fails
            assert cursor is not None
            try:
                self._batch = next(cursor)
            except StopIteration:
                self._end, self._here = place.at, place._replace(left=0)
                return None
            at = (*place.at[:2], cursor.position())
            self._before = place
            self._here = _Place(at, cursor.done, cursor.remaining(), cursor.passed_over())
        assert self._here is not None
        return self._batch, self._here

    def close(self) -> None:
        if self.cursor is not None:
            self.cursor.close()
        self.cursor = self._before = self._here = None


class _SharedCursor(Cursor):
    ended = False

    def __init__(self, reading: SharedStream, at: tuple[str, int, Any], seed: int) -> None:
        self._reading, self._seed = reading, seed
        self._passed_over: list[int] = []
        self._move(reading.go_to(at, seed), 0)
        assert reading.cursor is not None
        self.sample_numbers = reading.cursor.sample_numbers  # type: ignore[method-assign]

    def _move(self, place: _Place, count: int) -> None:
        self._place, self.done = place, place.done
        self._count = count if place.done is None else place.done
        self._reading.place = place.at[1], self._count

    def __next__(self) -> Any:
        following = None if self.ended else self._reading.after(self._place, self._seed)
        if following is None:
            self.ended = True
            raise StopIteration
        batch, place = following
        self._passed_over += place.passed_over
        self._move(place, self._count + 1)
        return copied(batch)  # the step of one run may change its batch in place

    def passed_over(self) -> list[int]:
        batches, self._passed_over = self._passed_over, []
        return batches

    def position(self) -> Any:
        return self._place.at[2]

    def remaining(self) -> int | None:
        return 0 if self.ended else self._place.left


def copied(batch: Any) -> Any:
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
        return kind._make(map(copied, batch))
    if kind in (tuple, list):
        return kind(map(copied, batch))
    if kind is dict:
        return {name: copied(part) for name, part in batch.items()}
    return copy.deepcopy(batch)
