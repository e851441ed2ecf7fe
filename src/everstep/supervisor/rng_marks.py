"""Random state of the program's own lines, which run again at a resume."""

from __future__ import annotations

from typing import Any

from everstep.state import capture, restore
from everstep.supervisor.user_state import UserState


class RngMarks:
    """Random state at the places after which lines of the program run that no step holds.

    At a resume these lines run again, before the run's own random state comes back: they draw the
    same numbers again.

    Args:
        user: has generators of its own.
        saved: what `tree` gave, empty in a fresh run.
    """

    def __init__(self, user: UserState, saved: dict[str, Any]) -> None:
        self._user, self._places = user, saved
        if saved:
            self.back_to("enter")
        else:
            self.mark("enter")

    def mark(self, place: str) -> None:
        """The lines from here to the next resume point draw from the random state as it is."""
        self._places[place] = {"global": capture(), "state": self._user.random_state()}

    def back_to(self, place: str) -> None:
        """Put back what was marked there, if it was."""
        if place in self._places:
            restore(self._places[place]["global"])
            self._user.set_random_state(self._places[place]["state"])

    def forget(self) -> None:
        """An epoch is over, or begins: none of its lines is to run again."""
        self._places = {"enter": self._places["enter"]}

    def tree(self) -> dict[str, Any]:
        """As saved, by place."""
        return dict(self._places)
