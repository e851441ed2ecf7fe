"""Sanity checks of a program: what its state lacks, steps without updates, metrics that never come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

from everstep.contracts.services import Service
from everstep.errors import ProgressError, StateError, alike, nearest
from everstep.supervisor.saving.state_tree import Progress
from everstep.supervisor.saving.user_state import UserState
from everstep.supervisor.voice import Voice

_LOOKS = 16
"""Number of first steps after which modules outside the state are looked at: an average changes rarely."""


class ProgramChecks:
    """Looks for what the state lacks, in the first steps and at boundaries."""

    def __init__(
        self,
        user: UserState,
        progress: Progress,
        first: int,
        voice: Voice,
        warn_once: Callable[[str], None],
    ) -> None:
        self._user, self._progress, self._first, self._voice = user, progress, first, voice
        self._warn_once = warn_once
        self._counters = user.counters.values()
        self.looks_left = _LOOKS
        """Number of steps after which modules outside the state are still to be looked at."""

    def look(self) -> None:
        self.looks_left -= 1
        try:
            epoch = self._progress.epoch
            names = [name for each in self._counters for name in each.outside.changed(epoch)]
        except Exception as error:  # of objects that do not belong to this run
            self.looks_left = 0
            self._voice.say(f"objects outside the state were not checked ({type(error).__name__}: {error})")
            return
        if names:
            self.looks_left = 0
            some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            remedy = "add it, as in state={..., 'metrics': metrics}"
            if (task := self._user.task) is not None:
                remedy = (
                    f"return it from {type(task).__name__}.state, as in {{**super().state(), 'metrics': "
                    "self.metrics}"
                )
            elif any(name.endswith("gradient_state.sync_gradients") for name in names):
                remedy = "save accelerate's count as `window` in docs/recipes/huggingface.md#accelerate does"
            elif all("." in name for name in names):
                remedy = "save it by an entry that holds its owner and has state_dict and load_state_dict"
            self._warn_once(
                f"{some}: the steps change it and the state does not save it, so after a resume it lacks the "
                f"earlier steps, and later steps or the epoch's tail may read it; {remedy}, or add what "
                "changes inside it, unless it is reset before each use"
            )

    def check_strangers(self) -> None:
        """Require that each optimizer of the state's parameters is in the state."""
        if strangers := [text for each in self._counters for text in each.strangers()]:
            raise StateError(
                f"{', '.join(strangers)} is not part of the state, so a resume would lose its effect; "
                "add it and the model that it steps, as in state={'model': model, 'optimizer': optimizer}"
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
        watching = self._watching()
        others = values - watching.keys()
        for metric in [name for name in watching if name not in values]:
            self._miss(metric, nearest(metric, values) if at_end else alike(metric, others).rstrip())

    def evaluated(self, names: Set[str]) -> None:
        self._evaluated |= names

    def check_evaluated(self, values: Set[str]) -> None:
        """Warn of each metric that an evaluation should have given: "valid/acuracy" beside "valid/loss"."""
        evaluated, self._evaluated = self._evaluated, set()
        if not evaluated:
            return
        for metric in [name for name in self._watching() if name not in values]:
            stream, slash, _ = metric.partition("/")
            beside = [name for name in evaluated if slash and name.startswith(f"{stream}/")]
            self._miss(metric, nearest(metric, beside) if beside else "")

    def _watching(self) -> dict[str, list[str]]:
        watching: dict[str, list[str]] = {}
        for service in self._services:
            for metric in service.watches:
                if metric not in self._missed:
                    watching.setdefault(metric, []).append(repr(service.name))
        return watching

    def _miss(self, metric: str, hint: str) -> None:
        if hint:
            names = self._watching()[metric]
            self._missed.add(metric)
            self._voice.warn(f"{', '.join(names)}: no value of {metric!r}; {hint}")
