"""Version 4: the values of each block as the journal packs them, for charts; labels are found by an index."""

from __future__ import annotations

import math
import struct
from itertools import groupby

from alembic.operations import Operations
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    ForeignKey,
    Integer,
    LargeBinary,
    Row,
    Select,
    Table,
    column,
    func,
    insert,
    select,
    table,
    text,
)

from everstep.contracts.metrics import Block
from everstep.index.stored_json import UnknownContentError
from everstep.record.journal_format import pack_block

_BATCH = 10_000


def upgrade(op: Operations) -> None:
    """Migrate from version 3: pack the rows again.

    Raises:
        UnknownContentError: a row has values of other types.
    """
    labels = text("path IN ('tags', 'note')")
    op.create_index("labels", "fields", ["run"], sqlite_where=labels, postgresql_where=labels)
    blocks = op.create_table(
        "blocks",
        Column("series", Integer, ForeignKey("series.id"), primary_key=True),
        Column("segment", Integer, primary_key=True),
        Column("offset", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
        Column("packed", LargeBinary, nullable=False),
    )
    connection = op.get_bind()
    if connection.dialect.name == "postgresql":
        _grant_as_before(connection)
    try:
        _fill(connection, blocks)
    except (TypeError, ValueError, OverflowError, struct.error) as error:
        raise UnknownContentError(f"a row has values of other types ({error})") from error


def _fill(connection: Connection, blocks: Table) -> None:
    ends, rows_of = _ends(connection), dict[tuple[int, int], int]()
    counts = select(_rows.c.series, _rows.c.segment, func.count()).group_by(_rows.c.series, _rows.c.segment)
    rows_of.update({(series, segment): rows for series, segment, rows in connection.execute(counts)})
    found: list[dict[str, object]] = []
    before, done = (0, 0), 0
    streamed = connection.execute(_in_order(), execution_options={"yield_per": _BATCH})
    for (series, segment, offset), lines in groupby(
        streamed, lambda row: (row.series, row.segment, row.offset)
    ):
        if (series, segment) != before:
            before, done = (series, segment), 0
        rows = list(lines)
        done += len(rows)
        begun, last = ends.get((rows[0].run, segment), (0.0, 0.0))
        # The index had no times of blocks: its charts took the rows of a start for evenly spread.
        time = begun + (last - begun) * done / rows_of[series, segment]
        found.append({"series": series, "segment": segment, "offset": offset, "packed": _packed(rows, time)})
        if len(found) >= _BATCH:
            connection.execute(insert(blocks), found)
            found.clear()
    if found:
        connection.execute(insert(blocks), found)


def _grant_as_before(connection: Connection) -> None:
    """Let whoever may read or write the rows of metrics do the same with the blocks."""
    granted = text(
        "SELECT r.rolname, a.privilege_type FROM pg_class c CROSS JOIN aclexplode(c.relacl) a "
        "LEFT JOIN pg_roles r ON r.oid = a.grantee WHERE c.oid = to_regclass('metrics')"
    )
    for role, privilege in connection.execute(granted).all():
        to = "PUBLIC" if role is None else connection.dialect.identifier_preparer.quote_identifier(role)
        connection.exec_driver_sql(f"GRANT {privilege} ON blocks TO {to}")


_rows = table(
    "metrics",
    *map(column, ("series", "segment", "offset", "row", "epoch", "step", "seq", "count", "value", "wall")),
)


def _in_order() -> Select[tuple[object, ...]]:
    """Select all rows, those of a block together."""
    series = table("series", *map(column, ("id", "run", "name", "phase")))
    place = _rows.c.series, _rows.c.segment, _rows.c.offset, _rows.c.row
    chosen = select(series.c.run, series.c.name, series.c.phase, *_rows.c)
    return chosen.join(_rows, _rows.c.series == series.c.id).order_by(*place)


def _ends(connection: Connection) -> dict[tuple[int, int], tuple[float, float]]:
    """Map (run, start) to the times at which the start began, and was seen last."""
    starts = table("segments", *map(column, ("run", "number", "started", "last")))
    found = {}
    for run, number, started, last in connection.execute(select(starts)):
        begun = started or last or 0.0
        found[run, number] = begun, max(last or 0.0, begun)
    return found


def _packed(rows: list[Row[tuple[object, ...]]], time: float) -> bytes:
    first = rows[0]
    steps, seqs, counts = ([row._mapping[name] for row in rows] for name in ("step", "seq", "count"))
    values = [math.nan if row.value is None else row.value for row in rows]
    return pack_block(
        Block(first.epoch, first.phase, first.name, bool(first.wall), steps, values, counts, seqs), time
    )
