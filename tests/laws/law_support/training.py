"""The victim's training inside the test's own process: many short runs, crashed by exceptions."""

from __future__ import annotations

import itertools
import random
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
    """Where to raise: at `step`, at the start or the end of its body, or in the tail that follows it."""

    where: str
    step: int


@dataclass
class Program:
    """What is the same at every start of a run.

    Attributes:
        arguments: of the victim script.
        services: makes the services of one start.
        observe: called with the loop inside its `with` block, before the first epoch.
        each_step: called with the loop and the training at the end of each step's body.
        loop: further arguments of the TrainLoop.
        extra: whether each epoch has a second loop, over other data.
        leave: break out of the step loop after every so many steps; 0: never.
    """

    arguments: Sequence[str] = ()
    services: Callable[[], list[everstep.Service]] = list
    observe: Callable[[everstep.TrainLoop], object] = lambda loop: None
    each_step: Callable[[everstep.TrainLoop, victim.Training], object] = lambda loop, training: None
    loop: dict[str, Any] = field(default_factory=dict)
    extra: bool = False
    leave: int = 0

    def run(self, run_dir: Path, crash: Crash | None = None) -> None:
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
            if crash == (where, step):
                raise CrashError

        options = {"max_epoch": args.epochs, "seed": args.seed, "services": self.services(), **self.loop}
        with everstep.TrainLoop(run_dir, training.state(), **options) as loop:
            self.observe(loop)
            for _ in loop.iter_epochs():
                for name, data in sources.items():
                    for step, (x, y) in loop.iter_steps(data, name):
                        reach("start", step)
                        loop.collect_metrics(training.step(step, x, y))
                        self.each_step(loop, training)
                        reach("end", step)
                        if self.leave and step % self.leave == 0:
                            break
                reach("tail", loop.step)
                training.per_epoch.step()
                self.evaluate(loop, training, args.evaluate)
                loop.print_logs()

    @staticmethod
    def evaluate(loop: everstep.TrainLoop, training: victim.Training, how: str) -> None:
        """The validation of one epoch."""
        if how == "isolated":
            with loop.evaluation():
                loop.collect_metrics(valid_loss=training.evaluate())
        elif how == "bare":
            loop.collect_metrics(valid_loss=training.evaluate())
