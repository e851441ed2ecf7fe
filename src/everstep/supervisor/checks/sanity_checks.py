"""Sanity checks of a program: what its state lacks, metrics that never come, loops without progress."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Set
from itertools import islice
from threading import get_ident
from typing import NamedTuple

from everstep.contracts.services import Service
from everstep.contracts.state import KINDS
from everstep.errors import ProgressError, StateError, alike, nearest, some
from everstep.services.console import Voice
from everstep.supervisor.saving.state_tree import Progress
from everstep.supervisor.saving.user_state import UserState

_WRAPPERS = {
    enumerate: "its numbers begin with 0 again; use loop.batch_index, or step",
    islice: "it counts its batches from 0 again; use steps_per_epoch=, or leave the loop at a value of "
    "loop.batch_index",
    zip: "the others begin again; give the loop an iterable whose __iter__ yields zip(a, b), and use "
    "loop.batch_index for a range",
}
_LOOKS = 16
"""Number of first steps after which modules outside the state are looked at: an average changes rarely."""
WORKING, BUSY = 10_000, 100_000
"""Rounds in a step that are too many: WORKING where an optimizer made updates, or each round drew a batch;
BUSY where the loop did not wait between them.  A loop that waits (sleeps, or reads) may ask for ever.

A WGAN's critic and PPO's epochs over a rollout ask within one step, up to thousands of times."""
_WAITING = 0.1
"""Part of the time below which a thread on the processor counts as waiting."""


def wrapper_warning(steps: object) -> str | None:
    """Warn of what counts around the iterator of a step loop, in whose first `next` this is called.

    It was made just now, so it is among the youngest objects.
    """
    # not [*a, *b], which would be one of its own items, and keep all of them
    for each in () if steps is None else gc.get_objects(0) + gc.get_objects(1):
        for kind, loss in _WRAPPERS.items():
            if type(each) is kind:  # a class of the program need not have a hash
                parts = gc.get_referents(each)
                parts += [part for pair in parts if type(pair) is tuple for part in pair]  # of zip
                if any(part is steps for part in parts):
                    return (
                        f"{kind.__name__}() around loop.iter_steps(): its place is not saved, so where a "
                        f"resume enters the epoch in its middle, {loss}"
                    )
    return None


class ProgramChecks:
    """Looks for what the state lacks, in the first steps and at boundaries."""

    def __init__(
        self, user: UserState, progress: Progress, first: int, voice: Voice, warn_once: Callable[[str], None]
    ) -> None:
        self._user, self._progress, self._first, self._voice = user, progress, first, voice
        self._warn_once, self._reported = warn_once, set[str]()
        self._counters = user.counters.values()
        self.looks_left = _LOOKS
        """Number of steps after which modules outside the state are still to be looked at."""

    def look(self) -> None:
        self.looks_left -= 1
        try:
            names = [name for each in self._counters for name in each.outside.changed(self._progress.epoch)]
        except Exception as error:  # of objects that do not belong to this run
            self.looks_left = 0
            self._voice.say(f"objects outside the state were not checked ({type(error).__name__}: {error})")
            return
        if names:
            self.looks_left = 0
            self.report(names)

    def report(self, names: Iterable[str]) -> None:
        """Warn of what changes in objects that the state does not save, of each once."""
        new = [name for name in names if name not in self._reported]
        self._reported.update(new)
        if new:
            remedy = "add it, as in state={..., 'metrics': metrics}"
            if any(name.endswith(f".{KINDS}") for name in new):
                remedy = (
                    "make all modules before the loop opens, and let a flag of their owner choose of them"
                )
            elif (task := self._user.task) is not None:
                remedy = (
                    f"return it from {type(task).__name__}.state, as in {{**super().state(), 'metrics': "
                    "self.metrics}"
                )
            elif any(name.endswith("gradient_state.sync_gradients") for name in new):
                remedy = "save accelerate's count as `window` in docs/recipes/huggingface.md#accelerate does"
            elif all("." in name for name in new):
                remedy = (
                    "make it an attribute of the module itself, or save it by an entry that holds its owner "
                    "and has state_dict and load_state_dict"
                )
            self._warn_once(
                f"{some(new, 5)}: the loop changes it and the state does not save it, so after a resume it "
                f"lacks the earlier steps, and later steps or the epoch's tail may read it; {remedy}, or add "
                "what changes inside it, unless it is reset before each use"
            )

    def check_strangers(self) -> None:
        """Require that each optimizer of the state's parameters is in the state; warn of new schedulers."""
        if strangers := [text for each in self._counters for text in each.strangers()]:
            raise StateError(
                f"{', '.join(strangers)} is not part of the state, so a resume would lose its effect; "
                "add it and the model that it steps, as in state={'model': model, 'optimizer': optimizer}"
            )
        if unscheduled := [name for each in self._counters for name in each.unscheduled()]:
            self._warn_once(
                "a scheduler was made in the loop for the learning rate of "
                f"{', '.join(map(repr, unscheduled))}, and the state does not save it, so a resume restarts "
                "its schedule; make it before the loop, and add it, as in state={..., 'scheduler': "
                "scheduler}, unless all that it does follows from `epoch` or `step`"
            )

    def check_updates(self) -> None:
        """Require a step of the state's optimizers; called after the first epoch, else at the loop's end."""
        counted = self._progress.step > self._first
        watched = any(each.optimizers for each in self._counters) and not self._user.updates
        if counted and watched and not any(each.left_out() for each in self._counters):
            raise ProgressError(
                f"{self._progress.step} steps were counted and no optimizer of the state made an update; "
                "call optimizer.step() in the loop, or leave the optimizer out of state"
            )


class WatchedMetrics:
    """Warns, once, of each metric that a service watches and that does not come."""

    def __init__(self, services: Iterable[Service], voice: Voice) -> None:
        self._services, self._voice = services, voice
        self._missed: set[str] = set()
        self._evaluated: set[str] = set()
        """Names that evaluations have found since the last `check_evaluated`."""

    def check(self, values: Set[str], *, at_end: bool = False) -> None:
        """Warn of each metric that never came; before the end, only if another metric has a name like it."""
        others = values - self._watched().keys()
        for metric in self._missing(values):
            self._miss(metric, nearest(metric, values) if at_end else alike(metric, others).rstrip())

    def evaluated(self, names: Set[str]) -> None:
        self._evaluated |= names

    def check_evaluated(self, values: Set[str]) -> None:
        """Warn of each metric that an evaluation should have given: "valid/acuracy" beside "valid/loss"."""
        evaluated, self._evaluated = self._evaluated, set()
        for metric in self._missing(values) if evaluated else ():
            stream, slash, _ = metric.partition("/")
            beside = [name for name in evaluated if slash and name.startswith(f"{stream}/")]
            self._miss(metric, nearest(metric, beside) if beside else "")

    def _watched(self) -> dict[str, None]:
        return dict.fromkeys(metric for service in self._services for metric in service.watches)

    def _missing(self, values: Set[str]) -> list[str]:
        return [name for name in self._watched() if name not in values and name not in self._missed]

    def _miss(self, metric: str, hint: str) -> None:
        if hint:
            self._missed.add(metric)
            names = ", ".join(repr(each.name) for each in self._services if metric in each.watches)
            self._voice.warn(f"{names}: no value of {metric!r}; {hint}")


class Work(NamedTuple):
    """Work of a loop so far: updates of the state's optimizers, and batches drawn."""

    updates: int
    drawn: int


class Rounds:
    """Counts the rounds of a loop in the thread that made the counter; `work`: what the loop has done."""

    def __init__(self, work: Callable[[], Work]) -> None:
        self.count = 0
        """Rounds since the loop last completed a step or an epoch."""
        self._most = 1
        self._work = work
        self._thread = get_ident()
        self._place = (-1, -1)
        self._second_work = self._last_work = Work(0, 0)
        self._wall_began = self._cpu_began = 0.0

    def note_round(self, place: tuple[int, int]) -> str | None:
        """Count a round; return what the rounds were spent on once there are too many, else None."""
        if get_ident() != self._thread:
            return None
        if place != self._place:
            self._place, self._most, self.count = place, max(self._most, self.count), 0
        self.count += 1
        if self.count == 2:
            self._second_work = self._last_work = self._work()
            self._wall_began, self._cpu_began = time.monotonic(), time.thread_time()
        return self._verdict() if self.count % WORKING == 0 else None

    @property
    def in_vain(self) -> bool:
        """Whether the loop has never needed this many rounds to complete a step or an epoch."""
        return get_ident() == self._thread and self.count > self._most

    def _verdict(self) -> str | None:
        earlier, self._last_work = self._last_work, self._work()
        if updates := self._last_work.updates - earlier.updates:
            return f"in which the optimizers of the state made {updates:,} updates"
        if self._last_work.drawn - self._second_work.drawn >= self.count - 2:
            return "each of which drew a batch"
        cpu, wall = time.thread_time() - self._cpu_began, time.monotonic() - self._wall_began
        return "between which it did not wait" if self.count >= BUSY and cpu >= _WAITING * wall else None
