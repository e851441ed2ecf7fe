"""Moments told to services: who hears of them, what each sees, and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from everstep.contracts.services import OBSERVED, SYNCHRONOUS, Action, Boundary, Moment, Service
from everstep.errors import UsageError
from everstep.metrics.collector import is_scalar
from everstep.supervisor.board import ServiceBoard
from everstep.supervisor.progress import Progress

Actions = Iterable[tuple[Service | None, Action]]


class Announcer:
    """Tells services of moments.

    Args:
        board: the services.
        progress: the run's counters.
        apply: takes the actions that services answer with.

    Attributes:
        synchronous: moments inside steps that a service asked for; the others cost nothing.
        looked_at: names of the outputs of steps that services look at.
    """

    def __init__(self, board: ServiceBoard, progress: Progress, apply: Callable[[Actions], None]) -> None:
        self._board, self._progress, self._apply = board, progress, apply
        self.synchronous: set[Moment] = set()
        self.looked_at: set[str] = set()
        self._outputs: dict[str, Any] = {}
        """Outputs of step `_outputs_of`, the newest that had any."""
        self._outputs_of = 0

    def services_changed(self) -> None:
        """Ask the services anew which moments and outputs they want."""
        self.synchronous = {moment for moment in SYNCHRONOUS if self._board.wanting(moment)}
        self.looked_at = {
            name for service in self._board.wanting(Moment.AFTER_STEP) for name in _names(service.outputs)
        }

    def view(self, moment: Moment, payload: Any = None) -> Callable[[Service], Boundary]:
        """Make the function that gives each service its view of a moment."""
        current = self._progress
        outputs = self._outputs if moment is Moment.AFTER_STEP and self._outputs_of == current.step else {}
        stop = None if current.stop is None else current.stop.reason

        def view(service: Service) -> Boundary:
            return Boundary(
                moment=moment,
                step=current.step,
                epoch=current.epoch,
                readings=self._board.reader(service),
                stop=stop,
                payload=payload,
                outputs={name: outputs[name] for name in _names(service.outputs) if name in outputs},
            )

        return view

    def fire(self, moment: Moment, payload: Any = None) -> None:
        """Tell a moment between boundaries to the services that asked for it, and apply their answers."""
        actions = self._board.run(self._board.wanting(moment), self.view(moment, payload))
        if actions and moment in OBSERVED:
            raise UsageError(
                f"{moment.name} is for observers, and {actions[0][0]!r} asked for {actions[0][1]}; "
                "act at another moment, such as AFTER_STEP"
            )
        self._apply(actions)

    def announce(self, moment: Moment, payload: Any = None) -> None:
        """Tell a moment inside a step to its observers, which may look but not act."""
        if moment in self.synchronous:
            self.fire(moment, payload)

    def without_outputs(self, step: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the metrics among a step's values, and keep the outputs that services look at."""
        if self._outputs_of != step:
            self._outputs, self._outputs_of = {}, step
        looked_at = {name: value for name, value in values.items() if name in self.looked_at}
        self._outputs.update(looked_at)
        return {n: v for n, v in values.items() if n not in looked_at or is_scalar(n, v)}


def _names(given: Sequence[str]) -> Sequence[str]:
    return (given,) if isinstance(given, str) else given
