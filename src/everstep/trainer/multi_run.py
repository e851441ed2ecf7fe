"""`MultiRun`: several models on one pass over the data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing

from everstep.contracts.data import Stream
from everstep.contracts.services import Interrupt
from everstep.errors import ConfigError, Interrupted
from everstep.state import capture, isolated, restore
from everstep.supervisor import Ending
from everstep.trainer.eval_ranks import refuse_several
from everstep.trainer.shared_stream import SharedStream, Tap
from everstep.trainer.trainer import Trainer
from everstep.trainer.trainer_loop import TrainerLoop


class MultiRun:
    """Several Trainers that train together: each batch is read once, for all of them.

        data = everstep.data.arrays(x, y, batch_size=64, shuffle=True, seed=0)
        small = everstep.Trainer(Digits(8), {"train": data}, "runs/small", max_step=1000, seed=7)
        large = everstep.Trainer(Digits(64), {"train": data}, "runs/large", max_step=1000, seed=7)
        everstep.MultiRun([small, large]).run_training()

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
                        _interrupt(going, behind.error)
            finally:
                for run in runs:
                    run.close()
        _raise(runs)
        return [run.ending for run in runs if run.ending is not None]


class _Turns:
    """The training of one Trainer, a step at a time.

    Attributes:
        over: whether the training has come to its end.
        ending: the ending of the training, unless it failed.
        error: the exception that has failed, or interrupted, the training.
        loop: the loop that is open; None before the first step.
    """

    def __init__(self, trainer: Trainer, tap: Tap) -> None:
        self.trainer, self.tap = trainer, tap
        self.over = False
        self.ending: Ending | None = None
        self.error: BaseException | None = None
        self.loop: TrainerLoop | None = None
        self._program = trainer.in_turns(tap)
        self._random = capture()

    def take(self) -> None:
        """Train to the end of the next step, with the random state of this run."""
        restore(self._random)
        try:
            self.loop = next(self._program)
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

    def close(self) -> None:
        """Leave a training that has not come to its end, as by an exception."""
        if not self.over:
            restore(self._random)
            self._program.close()


def _interrupt(going: Sequence[_Turns], error: Interrupted) -> None:
    """Interrupt the other runs: a run that was opened after the signal has not seen it."""
    for run in going:
        if run.over:
            continue
        if run.loop is None:
            run.over = True  # not begun
        else:
            assert isinstance(error.code, int)
            run.loop.call_soon(Interrupt(error.reason, error.code))


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
    """Return the stream that all Trainers train on.

    Raises:
        ConfigError: they have several streams, or reading together would give a run other batches than alone.
    """
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
    told = [None if seed is None else stream.describe(seed) for seed in (*seeds, 0, 1)]
    own_seed = told[-1] is not None and all(each == told[-1] for each in told if each is not None)
    if not own_seed and (None in seeds or len(set(seeds)) > 1):
        raise ConfigError(
            f"the order of the data follows from the seed of the run, and the runs have the seeds {seeds}; "
            "give all Trainers one seed, or the stream a seed of its own"
        )
    return stream
