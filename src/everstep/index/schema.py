"""The tables.  Rows are never changed by a resume: which are valid follows from `segments.valid_to`.

    runs         one per run
    segments     one per start of a run: a file of its journal, and how much of it is here
    series       one per metric and phase of a run
    metrics      one per value; NaN is NULL
    evaluations  (a view) the valid values measured outside steps
    checkpoints  one per commit that the journal speaks of; what is on the disk, the run directory knows
    events       one per event

A row lies at (segment, offset, row): the place of its block in what the segment wrote, and its place
in the block.  It is valid if `metrics.offset < segments.valid_to`.
"""

from __future__ import annotations

from sqlalchemy import (
    DDL,
    Column,
    Float,
    ForeignKey,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    event,
)

VERSION = 1
"""Of this schema.  A replica of another version is not migrated: it is made again from the journals."""

metadata = MetaData()

runs = Table(
    "runs",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("path", Text, nullable=False),
    Column("created", Float, nullable=False),  # seconds since 1970, as every time here
    Column("seed", Integer),
    Column("status", Text, nullable=False),  # running, finished, stopped, failed, killed
    Column("reason", Text),
    Column("started", Float),  # the newest start
    Column("heartbeat", Float),  # when it was last seen alive
    Column("step", Integer, nullable=False),
    Column("epoch", Integer, nullable=False),
)

segments = Table(
    "segments",
    metadata,
    Column("run", ForeignKey("runs.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("parent", Integer),
    Column("parent_offset", Integer),
    Column("valid_to", Integer, nullable=False),
    Column("size", Integer, nullable=False),  # bytes of the file that are here
    Column("end", Integer, nullable=False),  # the offset after them
    Column("begun", Integer, nullable=False),  # 0: killed before its start was written
    Column("started", Float),
    Column("last", Float),  # the newest time in it
    Column("status", Text),  # how it ended, by its own words; NULL if it did not say
    Column("reason", Text),
    Column("step", Integer, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("facts", Text, nullable=False),  # JSON
    Column("problems", Text, nullable=False),  # JSON: a list of sentences
    Column("torn", Text),  # what is wrong with the bytes after `size`
    sqlite_with_rowid=False,
)

series = Table(
    "series",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run", ForeignKey("runs.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("phase", Text, nullable=False),
    UniqueConstraint("run", "name", "phase"),
)

metrics = Table(
    "metrics",
    metadata,
    Column("series", ForeignKey("series.id"), primary_key=True),
    Column("segment", Integer, primary_key=True),
    Column("offset", Integer, primary_key=True),
    Column("row", Integer, primary_key=True),
    Column("epoch", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("seq", Integer, nullable=False),
    Column("count", Integer, nullable=False),
    Column("value", Float),
    Column("wall", Integer, nullable=False),
    sqlite_with_rowid=False,  # so a series lies together, in the order in which it was written
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("run", ForeignKey("runs.id"), primary_key=True),
    Column("segment", Integer, primary_key=True),
    Column("offset", Integer, primary_key=True),
    Column("name", Text, nullable=False),
    Column("bytes", Integer, nullable=False),
    Column("time", Float, nullable=False),
    sqlite_with_rowid=False,
)

events = Table(
    "events",
    metadata,
    Column("run", ForeignKey("runs.id"), primary_key=True),
    Column("segment", Integer, primary_key=True),
    Column("offset", Integer, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("time", Float, nullable=False),
    Column("wall", Integer, nullable=False),
    Column("data", Text, nullable=False),  # JSON
    sqlite_with_rowid=False,
)

event.listen(
    metadata,
    "after_create",
    DDL(  # type: ignore[no-untyped-call]
        "CREATE VIEW evaluations AS SELECT r.name AS run, m.epoch, m.step, s.phase, s.name, m.seq, m.value "
        "FROM metrics m JOIN series s ON s.id = m.series JOIN runs r ON r.id = s.run "
        "JOIN segments g ON g.run = s.run AND g.number = m.segment "
        "WHERE m.offset < g.valid_to AND s.phase NOT IN ('head', 'step')"
    ),
)
