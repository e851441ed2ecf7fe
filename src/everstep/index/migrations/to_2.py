"""Version 2: records of a run can be searched by path, a run has its machine, a checkpoint its step."""

from __future__ import annotations

import json

from alembic.operations import Operations
from sqlalchemy import Column, Float, Integer, Table, Text, column, insert, select, table, update

from everstep.index.fields import fields_of


def upgrade(op: Operations) -> None:
    """Migrate from version 1, which only SQLite has had."""
    op.add_column("runs", Column("host", Text))
    op.add_column("checkpoints", Column("step", Integer, nullable=False, server_default="0"))
    fields = op.create_table(
        "fields",
        Column("run", Integer, primary_key=True),
        Column("at", Integer, primary_key=True),
        Column("path", Text, nullable=False),
        Column("kind", Text, nullable=False),
        Column("number", Float),
        Column("text", Text),
        sqlite_with_rowid=False,
    )
    _fill_runs(op, fields)
    _fill_checkpoints(op)


def _fill_runs(op: Operations, fields: Table) -> None:
    connection = op.get_bind()
    runs = table("runs", column("id"), column("host"))
    starts = table("segments", column("run"), column("number"), column("begun"), column("facts"))
    begun = select(starts.c.run, starts.c.facts).where(starts.c.begun == 1).order_by(starts.c.number)
    newest = {run: json.loads(facts) for run, facts in connection.execute(begun)}
    for run, facts in newest.items():
        rows = [
            {"run": run, "at": at, "path": one.path, "kind": one.kind, "number": one.number, "text": one.text}
            for at, one in enumerate(fields_of(facts))
        ]
        if rows:
            connection.execute(insert(fields), rows)
        connection.execute(update(runs).where(runs.c.id == run).values(host=facts.get("host")))


def _fill_checkpoints(op: Operations) -> None:
    connection = op.get_bind()
    checkpoints = table("checkpoints", column("name"), column("step"))
    for name in connection.execute(select(checkpoints.c.name).distinct()).scalars().all():
        step = int(name.rpartition("-")[2])
        connection.execute(update(checkpoints).where(checkpoints.c.name == name).values(step=step))
