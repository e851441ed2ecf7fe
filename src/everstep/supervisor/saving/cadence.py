"""Cadence of saves: what a save costs is measured, for a schedule that depends on that."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from everstep.schedule import Schedule

if TYPE_CHECKING:
    from everstep.supervisor.engine import Engine

_OTHER = 1.25
"""Factor by which the time between saves has changed when a line is printed again."""


class _Moment(NamedTuple):
    """Seconds of the clock, those without evaluations, and completed steps."""

    seconds: float
    trained: float
    step: int


class _Cost(NamedTuple):
    """What a save has cost, in seconds."""

    wait: float
    """Training waited for it."""
    slower: float
    """The steps beside its writing took longer than others."""
    duration: float
    """From its beginning until it was on the disk."""


class Cadence:
    """Measures each save, and tells the schedule of saves before the next one."""

    def __init__(self, engine: Engine, schedule: Schedule) -> None:
        self._engine, self._schedule = engine, schedule
        self._begins = self._now()
        self._began: _Moment | None = None
        self._handed: _Moment | None = None
        self._written: _Moment | None = None
        self._rate: float | None = None
        """Steps per second before the newest save: those beside its writing may be slower."""
        self._failure: Exception | None = None
        self._announced = 0.0
        """Seconds between saves, as the user has heard last."""

    def _now(self) -> _Moment:
        engine = self._engine
        return _Moment(engine.clock(), engine.estimator.trained, engine.progress.step)

    def begin(self) -> None:
        """Note that training waits from here on, for what may become a save."""
        self._begins = self._now()

    def hand_over(self) -> None:
        """Note that the writer thread has a save, and training goes on."""
        self._began, self._handed, self._written = self._begins, self._now(), None
        self._rate = self._engine.estimator.rate()

    def written(self, seconds: float) -> None:
        """Note that the save was on the disk at this time of the clock, as a boundary has found later."""
        if self._handed is not None and self._written is None:
            self._written = self._now()._replace(seconds=seconds)

    def failed(self, error: Exception | None) -> None:
        """Note the failure of the newest save, if it has failed: the next one comes soon."""
        # of several ranks each finds that at its own boundary, and all must save at the same steps
        if error is not None and error is not self._failure and not self._engine.ranks.several:
            self._schedule.failed(self._engine.clock())
        self._failure = error

    def learn(self) -> None:
        """Tell the schedule what the newest save has cost; all ranks call this before they save.

        The writer's figures count on all of them, so that all save at the same steps.
        """
        engine = self._engine
        cost = self._cost()
        self._began = None  # what it has cost counts once
        shared = engine.ranks.group.share(
            cost and (*cost, 1 / (self._rate or math.inf)), "the cost of a save"
        )
        if shared is None:
            return
        *figures, step = shared
        cost = _Cost(*figures)
        seconds = self._schedule.learn(cost.wait + cost.slower, cost.duration, step)
        engine.journal.event("cadence", {"seconds": seconds, **cost._asdict()}, wall=True)
        if not self._announced / _OTHER < seconds < self._announced * _OTHER:
            self._announced = seconds
            engine.voice.say(
                f"saves: one each {seconds:.3g} s; the newest cost {cost.wait + cost.slower:.2g} s of "
                f"training and was on the disk after {cost.duration:.2g} s"
            )

    def _cost(self) -> _Cost | None:
        """Return what the newest save has cost; None where that is not known, or no measure for others."""
        began, handed, written = self._began, self._handed, self._written
        if began is None or handed is None or written is None or began.step == 0:
            return None  # the first save, before any step, also makes the buffers
        beside, rate = written.trained - handed.trained, self._rate
        usual = beside if rate is None else (written.step - handed.step) / rate
        wait = handed.seconds - began.seconds
        return _Cost(wait, min(max(beside - usual, 0.0), beside), written.seconds - began.seconds)
