"""Tables of the index.  A resume changes no rows: `segments.valid_to` decides which rows are valid.

    runs         one per run
    facts        one per name in the record of a run's newest start ("config", "git", ...), its value as JSON
    segments     one per start of a run: a file of its journal, and how much of it is here
    series       one per metric and phase of a run
    metrics      one per value; NaN is NULL
    blocks       one per block of values, as the journal packs it: for charts, which want all values at once
    valid_metrics, evaluations   (views) the valid values with their names, and those measured outside steps
    events       one per event

A row lies at (segment, offset, row): the place of its block in what the segment wrote, and its place
in the block.  It is valid if `metrics.offset < segments.valid_to`.

The tables are the same in SQLite and in PostgreSQL, where they lie in a schema of their version.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from sqlalchemy import (
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
    table,
)

VERSION = 9
"""Version of these tables.  Another version has tables of its own, beside these; the journals fill both."""

metadata = MetaData()

_Big = BigInteger().with_variant(Integer, "sqlite")  # every INTEGER of SQLite has 64 bits
_Words = Text().with_variant(Text(collation="C"), "postgresql")  # compared by code points, as SQLite does


def _columns(kind: Any, *names: str, **options: Any) -> list[Column[Any]]:
    return [Column(name, kind, **{"nullable": False, **options}) for name in names]


def _place(key: Column[Any]) -> list[Column[Any]]:
    """Return the columns of a place in a journal, which are the primary key."""
    return [key, *_columns(Integer, "segment", primary_key=True), *_columns(_Big, "offset", primary_key=True)]


runs = Table(
    "runs",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", _Words, nullable=False, unique=True),
    *_columns(_Words, "path", "status"),  # running, finished, stopped, failed, killed
    Column("created", Float, nullable=False),  # seconds since 1970, as every time here
    Column("started", Float),  # the newest start
    Column("heartbeat", Float),  # when it was last seen alive
    Column("duration", Float),  # seconds in which its starts were alive, NULL without a start
    *_columns(_Big, "step", "epoch"),  # the last ones that the newest start is known to have completed
    *_columns(_Big, "seed", "diverged", nullable=True),  # the first step that differed, NULL if none did
    *_columns(_Words, "reason", "host", nullable=True),  # of the newest start
    *_columns(Integer, "starts", "kills", server_default="0"),
    Column("verified", _Words),  # the worst of its resumes, of `badges.WORST_FIRST`
    Column("problems", _Words, nullable=False, server_default="[]"),  # JSON: a list of sentences
)

facts = Table(
    "facts",
    metadata,
    Column("name", _Words, primary_key=True),  # first: a filter reads one name of all runs
    Column("run", ForeignKey("runs.id"), primary_key=True, index=True),
    Column("value", _Words, nullable=False),  # JSON
    sqlite_with_rowid=False,
)

segments = Table(
    "segments",
    metadata,
    Column("run", ForeignKey("runs.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("parent", Integer),
    Column("parent_offset", _Big),
    *_columns(_Big, "valid_to", "size"),  # `size`: bytes of the file that are here
    Column("begun", Integer, nullable=False),  # 0: killed before its start was written
    *_columns(Float, "started", "last", nullable=True),  # `last`: the newest time in it
    Column("zero", Float, nullable=False),  # what its times are less, as seconds in which the run was alive
    *_columns(_Words, "said", "status", "reason", nullable=True),  # `said`: how it ended, by its own words
    *_columns(_Big, "step", "epoch"),
    *_columns(_Words, "facts", "problems"),  # JSON
    Column("torn", _Words),  # the fault of the bytes after `size`
    *_columns(_Words, "badge", "how", nullable=True),  # how its resume was verified: a word, its report
    Column("diverged_at", _Big),
    Column("again", _Big),  # number of steps that it compared with an earlier execution
    sqlite_with_rowid=False,
)

series = Table(
    "series",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run", ForeignKey("runs.id"), nullable=False),
    *_columns(_Words, "name", "phase"),
    UniqueConstraint("run", "name", "phase"),
)

metrics = Table(
    "metrics",
    metadata,
    *_place(Column("series", ForeignKey("series.id"), primary_key=True)),
    Column("row", Integer, primary_key=True),
    *_columns(_Big, "epoch", "step", "seq", "count"),
    Column("value", Float),
    Column("wall", Integer, nullable=False),
    sqlite_with_rowid=False,  # so a series lies together, in the order in which it was written
)

blocks = Table(
    "blocks",
    metadata,
    *_place(Column("series", ForeignKey("series.id"), primary_key=True)),
    # before the values, which a database reads more slowly: `everstep.record.journal_format.sketch`
    Column("sketch", LargeBinary, nullable=False),
    Column("packed", LargeBinary, nullable=False),  # `everstep.record.journal_format.pack_block`
)

events = Table(
    "events",
    metadata,
    *_place(Column("run", ForeignKey("runs.id"), primary_key=True)),
    Column("kind", _Words, nullable=False),
    Column("time", Float, nullable=False),
    Column("wall", Integer, nullable=False),
    Column("data", _Words, nullable=False),  # JSON
    sqlite_with_rowid=False,
)

VIEWS = (
    "CREATE VIEW valid_metrics AS SELECT r.name AS run, s.phase, s.name, m.epoch, m.step, m.seq, m.value, "
    'm."count", m.wall, m.segment, m."offset", m."row", s.run AS run_id, m.series '
    "FROM metrics m JOIN series s ON s.id = m.series JOIN runs r ON r.id = s.run "
    'JOIN segments g ON g.run = s.run AND g.number = m.segment WHERE m."offset" < g.valid_to',
    "CREATE VIEW evaluations AS SELECT run, epoch, step, phase, name, seq, value FROM valid_metrics "
    "WHERE phase NOT IN ('head', 'step')",
)

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
    with contextlib.suppress(ValueError, TypeError):
        if isinstance(value := json.loads(text), kind):
            return value
    raise UnknownContentError(f"a row has {str(text)[:40]!r} for the JSON of a {kind.__name__}")
