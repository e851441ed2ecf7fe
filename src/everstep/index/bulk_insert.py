"""Fast insertion of many rows into a table, in each database's own way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Select, Table, insert, select

if TYPE_CHECKING:
    from sqlalchemy.dialects.postgresql import Insert

_FEW = 200
"""Number of rows below which a staging table does not pay."""


def insert_rows(connection: Connection, table: Table, rows: list[tuple[Any, ...]]) -> None:
    """Insert rows whose values are in the order of the table's columns.

    On PostgreSQL an existing row with the same key is replaced.
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
    """Insert rows, or those of a query; an existing row with the same key is replaced."""
    from sqlalchemy.dialects.postgresql import insert as upserting

    upsert = upserting(table)
    if source is not None:
        upsert = upsert.from_select(list(table.columns.keys()), source)
    keys = list(table.primary_key.columns)
    others = {column.name: upsert.excluded[column.name] for column in table.columns if column not in keys}
    return upsert.on_conflict_do_update(index_elements=keys, set_=others)


def _copy(connection: Connection, table: Table, rows: list[tuple[Any, ...]]) -> None:
    """Insert by COPY into a temporary table, and from there into the table: COPY cannot replace rows."""
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
