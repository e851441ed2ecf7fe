"""Many rows into a table, as fast as each database takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Select, Table, insert, select

if TYPE_CHECKING:
    from sqlalchemy.dialects.postgresql import Insert

_FEW = 200
"""Fewer rows are not worth a table to put them in first."""


def insert_rows(connection: Connection, table: Table, rows: list[tuple[Any, ...]]) -> None:
    """Insert rows that are given in the order of the table's columns.

    On PostgreSQL a row whose key is there already is replaced.
    """
    if not rows:
        return
    if connection.dialect.name != "postgresql":
        connection.exec_driver_sql(str(insert(table).compile(connection)), rows)
    elif len(rows) < _FEW:
        names = table.columns.keys()
        connection.execute(_upsert(table), [dict(zip(names, row, strict=True)) for row in rows])
    else:
        _copy(connection, table, rows)


def _upsert(table: Table, source: Select[Any] | None = None) -> Insert:
    """Insert rows, or those of a query; where there is one of the same key it is replaced."""
    from sqlalchemy.dialects.postgresql import insert as upserting

    upsert = upserting(table)
    if source is not None:
        upsert = upsert.from_select(list(table.columns.keys()), source)
    keys = list(table.primary_key.columns)
    others = {column.name: upsert.excluded[column.name] for column in table.columns if column not in keys}
    return upsert.on_conflict_do_update(index_elements=keys, set_=others)


def _copy(connection: Connection, table: Table, rows: list[tuple[Any, ...]]) -> None:
    """COPY into a table of this session's own, and from there over what is there."""
    quote = connection.dialect.identifier_preparer.quote
    columns = ", ".join(quote(column.name) for column in table.columns)
    staging = Table(f"new_{table.name}", type(table.metadata)(), *(c._copy() for c in table.columns))
    connection.exec_driver_sql(
        f"CREATE TEMP TABLE IF NOT EXISTS {staging.name} (LIKE {table.name}) ON COMMIT DELETE ROWS"
    )
    driver: Any = connection.connection.driver_connection
    with driver.cursor() as cursor, cursor.copy(f"COPY {staging.name} ({columns}) FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)
    connection.execute(_upsert(table, select(staging)))
    connection.exec_driver_sql(f"TRUNCATE {staging.name}")
