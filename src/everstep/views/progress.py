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

    from everstep.index.sql_tables import valid_metrics

    m = valid_metrics.c
    mine = (m.run_id == run) & m.phase.in_(("epoch", "tail")) & (m.epoch > 0)
    ends = select(m.epoch, m.step).where(mine).order_by(m.epoch.desc(), m.step.desc())
    row = connection.execute(ends.limit(1)).first()
    return None if row is None else (row.epoch, row.step)
