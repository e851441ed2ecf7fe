"""Watched metrics: a warning for each metric of a service without a value."""

from __future__ import annotations

from collections.abc import Iterable, Set

from everstep.contracts.services import Service
from everstep.errors import alike, nearest
from everstep.supervisor.voice import Voice


class WatchedMetrics:
    """Warns, once, of each metric that a service watches and that does not come.

    Args:
        services: the services of the run; more may come.
        voice: warns the user.
    """

    def __init__(self, services: Iterable[Service], voice: Voice) -> None:
        self._services, self._voice = services, voice
        self._missed: set[str] = set()
        self._evaluated: set[str] = set()
        """Names that evaluations have found since the last `check_evaluated`."""

    def check(self, values: Set[str], *, at_end: bool = False) -> None:
        """Warn of each metric that never came; before the end, only if another metric has a name like it.

        Args:
            values: the names of metrics that have a value.
        """
        watching = self._watching()
        others = values - watching.keys()
        for metric in [name for name in watching if name not in values]:
            self._miss(metric, nearest(metric, values) if at_end else alike(metric, others).rstrip())

    def evaluated(self, names: Set[str]) -> None:
        """Note the names of metrics that an evaluation has found."""
        self._evaluated |= names

    def check_evaluated(self, values: Set[str]) -> None:
        """Warn of each metric that an evaluation should have given, as "valid/acuracy" beside "valid/loss".

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
        """Return the names of the services that watch each metric, by metric."""
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
