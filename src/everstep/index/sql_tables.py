"""Tables of the index.  A resume changes no rows: `segments.valid_to` decides which rows are valid.

    runs         one per run
    facts        one per name in the record of a run's newest start ("config", "git", ...), its value as JSON
    segments     one per start of a run: a file of its journal, and how much of it is here
    series       one per metric and phase of a run
    metrics      one per value; NaN is NULL
    blocks       one per block of values, as the journal packs it: for charts, which want all values at once
    valid_metrics, evaluations   (views) the valid values with their names, and those measured outside steps
    checkpoints  one per commit in the journal; the run directory decides which are still on the disk
    events       one per event

A row lies at (segment, offset, row): the place of its block in what the segment wrote, and its place
in the block.  It is valid if `metrics.offset < segments.valid_to`.

The tables are the same in SQLite and in PostgreSQL, where they lie in a schema of their version.
"""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import (
    DDL,
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    column,
    event,
    table,
)

VERSION = 5
"""Version of these tables.  Another version has tables of its own, beside these; the journals fill both."""

metadata = MetaData()

Big = BigInteger().with_variant(Integer, "sqlite")  # every INTEGER of SQLite has 64 bits
Words = Text().with_variant(Text(collation="C"), "postgresql")  # compared by code points, as SQLite does

runs = Table(
    "runs",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Words, nullable=False, unique=True),
    Column("path", Words, nullable=False),
    Column("created", Float, nullable=False),  # seconds since 1970, as every time here
    Column("seed", Big),
    Column("status", Words, nullable=False),  # running, finished, stopped, failed, killed
    Column("reason", Words),
    Column("started", Float),  # the newest start
    Column("heartbeat", Float),  # when it was last seen alive
    Column("step", Big, nullable=False),  # the last one that the newest start is known to have completed
    Column("epoch", Big, nullable=False),
    Column("host", Words),  # of the newest start
    Column("diverged", Big),  # the step at which a resume first differed, NULL if none did
)

facts = Table(
    "facts",
    metadata,
    Column("name", Words, primary_key=True),  # first: a filter reads one name of all runs
    Column("run", ForeignKey("runs.id"), primary_key=True, index=True),
    Column("value", Words, nullable=False),  # JSON
    sqlite_with_rowid=False,
)

segments = Table(
    "segments",
    metadata,
    Column("run", ForeignKey("runs.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("parent", Integer),
    Column("parent_offset", Big),
    Column("valid_to", Big, nullable=False),
    Column("size", Big, nullable=False),  # bytes of the file that are here
    Column("end", Big, nullable=False),  # the offset after them
    Column("begun", Integer, nullable=False),  # 0: killed before its start was written
    Column("started", Float),
    Column("last", Float),  # the newest time in it
    Column("status", Words),  # how it ended, by its own words; NULL if it did not say
    Column("reason", Words),
    Column("step", Big, nullable=False),
    Column("epoch", Big, nullable=False),
    Column("facts", Words, nullable=False),  # JSON
    Column("problems", Words, nullable=False),  # JSON: a list of sentences
    Column("torn", Words),  # the fault of the bytes after `size`
    sqlite_with_rowid=False,
)

series = Table(
    "series",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run", ForeignKey("runs.id"), nullable=False),
    Column("name", Words, nullable=False),
    Column("phase", Words, nullable=False),
    UniqueConstraint("run", "name", "phase"),
)

metrics = Table(
    "metrics",
    metadata,
    Column("series", ForeignKey("series.id"), primary_key=True),
    Column("segment", Integer, primary_key=True),
    Column("offset", Big, primary_key=True),
    Column("row", Integer, primary_key=True),
    Column("epoch", Big, nullable=False),
    Column("step", Big, nullable=False),
    Column("seq", Big, nullable=False),
    Column("count", Big, nullable=False),
    Column("value", Float),
    Column("wall", Integer, nullable=False),
    sqlite_with_rowid=False,  # so a series lies together, in the order in which it was written
)

blocks = Table(
    "blocks",
    metadata,
    Column("series", ForeignKey("series.id"), primary_key=True),
    Column("segment", Integer, primary_key=True),
    Column("offset", Big, primary_key=True),
    Column("packed", LargeBinary, nullable=False),  # `everstep.record.journal_format.pack_block`
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("run", ForeignKey("runs.id"), primary_key=True),
    Column("segment", Integer, primary_key=True),
    Column("offset", Big, primary_key=True),
    Column("name", Words, nullable=False),
    Column("bytes", Big, nullable=False),
    Column("time", Float, nullable=False),
    Column("step", Big, nullable=False),
    sqlite_with_rowid=False,
)

events = Table(
    "events",
    metadata,
    Column("run", ForeignKey("runs.id"), primary_key=True),
    Column("segment", Integer, primary_key=True),
    Column("offset", Big, primary_key=True),
    Column("kind", Words, nullable=False),
    Column("time", Float, nullable=False),
    Column("wall", Integer, nullable=False),
    Column("data", Words, nullable=False),  # JSON
    sqlite_with_rowid=False,
)

_VIEWS = (
    "CREATE VIEW valid_metrics AS SELECT r.name AS run, s.phase, s.name, m.epoch, m.step, m.seq, m.value, "
    'm."count", m.wall, m.segment, m."offset", m."row", s.run AS run_id, m.series '
    "FROM metrics m JOIN series s ON s.id = m.series JOIN runs r ON r.id = s.run "
    'JOIN segments g ON g.run = s.run AND g.number = m.segment WHERE m."offset" < g.valid_to',
    "CREATE VIEW evaluations AS SELECT run, epoch, step, phase, name, seq, value FROM valid_metrics "
    "WHERE phase NOT IN ('head', 'step')",
)
for _view in _VIEWS:
    event.listen(metadata, "after_create", DDL(_view))  # type: ignore[no-untyped-call]

valid_metrics = table(
    "valid_metrics",
    *map(column, ("run", "phase", "name", "epoch", "step", "seq")),
    column("value", Float),
    *map(column, ("count", "wall", "segment", "offset", "row", "run_id", "series")),
)


class UnknownContentError(ValueError):
    """A row has content that everstep does not write; `Database` reports the index as malformed."""


def stored(text: str, kind: type = dict) -> Any:
    """Parse the JSON of a row, whose value must be of a type."""
    try:
        value = json.loads(text)
    except (ValueError, TypeError) as error:
        raise UnknownContentError(f"a row has {str(text)[:40]!r} for JSON") from error
    if not isinstance(value, kind):
        raise UnknownContentError(f"a row has {str(text)[:40]!r} for a {kind.__name__}")
    return value
