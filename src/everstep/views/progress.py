"""How far a run is on its way: the steps of the whole run, its pace, and the time that is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlalchemy import Connection

LOOKS = 20
"""Most looks from which a pace is computed."""


def pace(looks: Sequence[tuple[float, int]]) -> float:
    """Compute the steps per second since the oldest of some looks, (time, step); 0 if that is not known."""
    if not looks:
        return 0.0
    (first, step), (last, now) = looks[0], looks[-1]
    return (now - step) / (last - first) if last > first and now > step else 0.0


def seconds_left(step: int, steps: int | None, rate: float) -> float | None:
    """Return the seconds up to the end of the run; None if that is not known."""
    return (steps - step) / rate if rate and steps is not None and steps > step else None


def whole_steps(connection: Connection, run: int, facts: Mapping[str, Any]) -> int | None:
    """Return the number of steps at which a run will be complete, as far as its limits tell.

    Args:
        run: its key in the index.
        facts: the record of its newest start.
    """
    limits = facts.get("limits")
    limits, found = limits if isinstance(limits, dict) else {}, []
    if isinstance(limits.get("max_step"), int):
        found.append(limits["max_step"])
    if isinstance(limits.get("max_epoch"), int) and (end := _last_end(connection, run)) is not None:
        epoch, step = end
        found.append(round(step / epoch * limits["max_epoch"]))
    return min(found, default=None)


def _last_end(connection: Connection, run: int) -> tuple[int, int] | None:
    """Return (epoch, step) of the last epoch that ended with a value of a metric."""
    from sqlalchemy import select

    from everstep.index.run_queries import valid
    from everstep.index.sql_tables import metrics, segments, series

    ends = select(metrics.c.epoch, metrics.c.step).join(series, metrics.c.series == series.c.id)
    ends = ends.join(segments, valid() & (segments.c.run == series.c.run))
    mine = ends.where(series.c.run == run, series.c.phase.in_(("epoch", "tail")), metrics.c.epoch > 0)
    row = connection.execute(mine.order_by(metrics.c.epoch.desc(), metrics.c.step.desc()).limit(1)).first()
    return None if row is None else (row.epoch, row.step)
