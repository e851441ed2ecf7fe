"""The victim's training inside the test's own process: many short runs, crashed by exceptions."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import everstep
from law_support import victim

STARTS = itertools.count()
"""Numbers the starts: each finds other random states than the one before."""


class CrashError(Exception):
    """What a crash raises; nobody else does."""


class Crash(NamedTuple):
    """Where to raise, or to send SIGTERM to this process."""

    where: str  # "start" or "end" of the body of `step`; "tail" or "head": of an epoch, behind `step`
    step: int
    by_signal: bool = False


@dataclass
class Program:
    """What is the same at every start of a run."""

    arguments: Sequence[str] = ()  # of the victim script
    services: Callable[[], list[everstep.Service]] = list  # makes those of one start
    observe: Callable[[Any], object] = lambda loop: None  # called before the first epoch
    each_step: Callable[[Any, victim.Training], object] = lambda loop, training: None  # at its end
    loop: dict[str, Any] = field(default_factory=dict)  # further arguments of the TrainLoop
    extra: bool = False  # whether each epoch has a second loop, over other data
    leave: int = 0  # break out of the step loop after every so many steps; 0: never
    busy: int = 0  # print and save by hand at every so many steps; 0: never
    stop: int = 0  # ask for the end at this step; 0: never

    def run(self, run_dir: Path, crash: Crash | None = None, **limits: int) -> everstep.TrainLoop:
        """One start, in whatever random state the process is.

        Raises:
            CrashError: at `crash`, if the start comes to it.
        """
        args = victim.options([str(run_dir), *self.arguments])
        random.seed(next(STARTS))
        np.random.seed(next(STARTS))
        training = victim.Training(args)
        sources = {"train": victim.batches(args, training.x, training.y)}
        if self.extra:
            sources["extra"] = everstep.data.arrays(training.x[:70], training.y[:70], batch_size=32)

        def reach(where: str, step: int) -> None:
            if crash is not None and crash[:2] == (where, step):
                if not crash.by_signal:
                    raise CrashError
                os.kill(os.getpid(), signal.SIGTERM)

        options = {"max_epoch": args.epochs, "seed": args.seed, "services": self.services()}
        options |= {**self.loop, **limits}
        with everstep.TrainLoop(run_dir, training.state(), **options) as loop:
            self.observe(loop)
            for epoch in loop.iter_epochs():
                reach("head", loop.step)
                loop.collect_metrics(head=1.0 / epoch)
                for name, data in sources.items():
                    for step, (x, y) in loop.iter_steps(data, name):
                        reach("start", step)
                        loop.collect_metrics(training.step(step, x, y))
                        self.each_step(loop, training)
                        if self.busy and step % self.busy == 0:
                            loop.make_checkpoint()
                            loop.print_logs()
                        if step == self.stop:
                            loop.request_stop("enough")
                        reach("end", step)
                        if self.leave and step % self.leave == 0:
                            break
                reach("tail", loop.step)
                training.per_epoch.step()
                self.evaluate(loop, training, args.evaluate)
                loop.print_logs()
        return loop

    @staticmethod
    def evaluate(loop: everstep.TrainLoop, training: victim.Training, how: str) -> None:
        """The validation of one epoch."""
        if how == "isolated":
            with loop.evaluation():
                loop.collect_metrics(valid_loss=training.evaluate())
        elif how == "bare":
            loop.collect_metrics(valid_loss=training.evaluate())
