"""The metrics that services are there for: one of which no value comes is warned about."""

from __future__ import annotations

from collections.abc import Iterable, Set

from everstep.contracts.services import Service
from everstep.errors import alike, nearest
from everstep.supervisor.voice import Voice


class WatchedMetrics:
    """What services watch, each warned about once.

    Args:
        services: those of the run; more may come.
        voice: warns the user.
    """

    def __init__(self, services: Iterable[Service], voice: Voice) -> None:
        self._services, self._voice = services, voice
        self._missed: set[str] = set()
        self._evaluated: set[str] = set()
        """Names that evaluations have found since the last `check_evaluated`."""

    def check(self, values: Set[str], *, at_end: bool = False) -> None:
        """Warn of each that never came; before the end, if another metric's name is like its own.

        Args:
            values: the names of which a value has come.
        """
        watching = self._watching()
        others = values - watching.keys()
        for metric in [name for name in watching if name not in values]:
            self._miss(metric, nearest(metric, values) if at_end else alike(metric, others).rstrip())

    def evaluated(self, names: Set[str]) -> None:
        """An evaluation has found metrics of these names."""
        self._evaluated |= names

    def check_evaluated(self, values: Set[str]) -> None:
        """Warn of each that should have come with an evaluation, as "valid/acuracy" with "valid/loss".

        Args:
            values: as for `check`.
        """
        evaluated, self._evaluated = self._evaluated, set()
        if not evaluated:
            return
        for metric in [name for name in self._watching() if name not in values]:
            stream, slash, _ = metric.partition("/")
            beside = [name for name in evaluated if slash and name.startswith(f"{stream}/")]
            self._miss(metric, nearest(metric, beside) if beside else "")

    def _watching(self) -> dict[str, list[str]]:
        """By metric, the services that are there for it."""
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
            self._voice.warn(f"{', '.join(names)}: no value of {metric!r} has come; {hint}")
