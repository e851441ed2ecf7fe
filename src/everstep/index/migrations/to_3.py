"""Version 3: a run has the step of its first divergence, and its last completed step, not its last row's."""

from __future__ import annotations

import json
from collections import defaultdict

from alembic.operations import Operations
from sqlalchemy import BigInteger, Column, Integer, column, select, table, update

from everstep.record.segment_file import Event


def upgrade(op: Operations) -> None:
    """Migrate from version 2: compute the new values from its rows of events and segments."""
    op.add_column("runs", Column("diverged", BigInteger().with_variant(Integer, "sqlite")))
    connection = op.get_bind()
    starts = table("segments", *map(column, ("run", "number", "begun", "step", "epoch", "facts")))
    told = table("events", *map(column, ("run", "segment", "offset", "kind", "data")))
    runs = table("runs", column("id"), column("step"), column("epoch"))
    by_start = defaultdict(list)
    for row in connection.execute(select(told)):
        by_start[row.run, row.segment].append(
            Event(row.segment, row.offset, row.kind, json.loads(row.data), True, 0)
        )
    newest: dict[int, tuple[int, int]] = {}
    for row in connection.execute(select(starts).order_by(starts.c.run, starts.c.number)).all():
        begun = Event(row.number, 0, "segment", {"facts": json.loads(row.facts)}, True, 0)
        found = [event.completed for event in (begun, *by_start[row.run, row.number])]
        step, epoch = max(row.step, *(s for s, _ in found)), max(row.epoch, *(e for _, e in found))
        mine = (starts.c.run == row.run) & (starts.c.number == row.number)
        connection.execute(update(starts).where(mine).values(step=step, epoch=epoch))
        if row.begun:
            newest[row.run] = step, epoch or newest.get(row.run, (0, 0))[1]
    for run, (step, epoch) in newest.items():
        connection.execute(update(runs).where(runs.c.id == run).values(step=step, epoch=epoch))
