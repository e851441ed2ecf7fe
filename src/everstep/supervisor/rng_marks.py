"""Random state of the program's own lines, which run again at a resume."""

from __future__ import annotations

from typing import Any

from everstep.state import capture, restore
from everstep.supervisor.user_state import UserState


class RngMarks:
    """Random state at the places where lines of the program outside steps begin.

    At a resume these lines run again, before the run's own random state comes back, and draw the same
    numbers as the first time.

    Args:
        user: the state, which may hold generators.
        saved: what `tree` gave, empty in a fresh run.
    """

    def __init__(self, user: UserState, saved: dict[str, Any]) -> None:
        self._user, self._places = user, saved
        if saved:
            self.back_to("enter")
        else:
            self.mark("enter")

    def mark(self, place: str) -> None:
        """Mark the random state from which the lines up to the next resume point draw."""
        self._places[place] = {"global": capture(), "state": self._user.random_state()}

    def back_to(self, place: str) -> None:
        """Put back the random state marked at `place`, if there is a mark."""
        if place in self._places:
            restore(self._places[place]["global"])
            self._user.set_random_state(self._places[place]["state"])

    def forget(self) -> None:
        """Forget the marks of an epoch that is over: none of its lines will run again."""
        self._places = {"enter": self._places["enter"]}

    def tree(self) -> dict[str, Any]:
        """Return the marks by place, as they are saved."""
        return dict(self._places)
