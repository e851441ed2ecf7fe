"""The metrics that services are there for: one of which no value comes is warned about."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

from everstep.contracts import Service
from everstep.errors import alike, nearest


class WatchedMetrics:
    """What services watch, each warned about once.

    Args:
        services: those of the run; more may come.
        warn: takes sentences for the user.
    """

    def __init__(self, services: Iterable[Service], warn: Callable[[str], None]) -> None:
        self._services, self._warn = services, warn
        self._missed: set[str] = set()

    def check(self, values: Set[str], *, at_end: bool = False) -> None:
        """Warn of each that never came; before the end, if another metric's name is like its own.

        Args:
            values: the names of which a value has come.
        """
        watching: dict[str, list[str]] = {}
        for service in self._services:
            for metric in service.watches:
                watching.setdefault(metric, []).append(repr(service.name))
        others = values - watching.keys()
        for metric, names in watching.items():
            if metric in values or metric in self._missed:
                continue
            if hint := nearest(metric, values) if at_end else alike(metric, others).rstrip():
                self._missed.add(metric)
                self._warn(f"{', '.join(names)}: no value of {metric!r} has come; {hint}")
