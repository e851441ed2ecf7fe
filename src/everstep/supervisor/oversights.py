"""Oversights of a program: optimizers and modules outside the state, steps that update nothing."""

from __future__ import annotations

from everstep.errors import ProgressError, StateError
from everstep.supervisor.progress import Progress
from everstep.supervisor.user_state import UserState
from everstep.supervisor.voice import Voice

_LOOKS = 16
"""Number of first steps after which modules outside the state are looked at: an average changes rarely."""


class Oversights:
    """Looks for what the state lacks, in the first steps and at boundaries.

    Args:
        first: step at which this start begins.

    Attributes:
        looks_left: number of steps after which modules outside the state are still to be looked at.
    """

    def __init__(self, user: UserState, progress: Progress, first: int, voice: Voice) -> None:
        self._user, self._progress, self._first, self._voice = user, progress, first, voice
        self.looks_left = _LOOKS

    def look(self) -> None:
        """Look, after one of the first steps, for changes in what the state does not save."""
        self.looks_left -= 1
        try:
            names = self._user.forgotten(self._progress.epoch)
        except Exception as error:  # of objects that do not belong to this run
            self.looks_left = 0
            self._voice.say(
                f"what lies outside the state was not looked at ({type(error).__name__}: {error})"
            )
            return
        if names:
            self.looks_left = 0
            self._voice.warn(
                f"{', '.join(names)}: the steps change it and the state does not save it, so a resume inside "
                "an epoch begins it anew, and what the tail reads from it lacks the steps before; add it, as "
                "in state={..., 'metrics': metrics}, unless it is begun anew before each use"
            )

    def check_strangers(self) -> None:
        """Require that each optimizer of the state's parameters is in the state."""
        if strangers := self._user.strangers():
            raise StateError(
                f"{', '.join(strangers)} is not part of the state, so a resume would lose what it does; "
                "add it and what it steps, as in state={'model': model, 'optimizer': optimizer}"
            )

    def check_updates(self) -> None:
        """Require a step of the state's optimizers; called after the first epoch, else at the loop's end."""
        counted = self._progress.step > self._first
        none = self._user.watches_optimizers and not self._user.updates
        if counted and none and not self._user.left_out():
            raise ProgressError(
                f"{self._progress.step} steps were counted and no optimizer of the state made an update; "
                "call optimizer.step() in the loop, or leave the optimizer out of state"
            )
