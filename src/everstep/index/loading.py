"""Many rows into a table, as fast as each database takes them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Table, insert, select

Rows = list[tuple[Any, ...]]


def load(connection: Connection, table: Table, rows: Rows) -> None:
    """Insert rows that are given in the order of the table's columns.

    On PostgreSQL a row whose key is there already is replaced.
    """
    if not rows:
        return
    if connection.dialect.name == "postgresql":
        _copy(connection, table, rows)
    else:
        connection.exec_driver_sql(str(insert(table).compile(connection)), rows)


def _copy(connection: Connection, table: Table, rows: Rows) -> None:
    """COPY into a table of this transaction's own, and from there over what is there."""
    from sqlalchemy.dialects import postgresql

    quote = connection.dialect.identifier_preparer.quote
    columns = ", ".join(quote(column.name) for column in table.columns)
    staging = Table(f"new_{table.name}", type(table.metadata)(), *(c._copy() for c in table.columns))
    connection.exec_driver_sql(
        f"CREATE TEMP TABLE IF NOT EXISTS {staging.name} (LIKE {table.name}) ON COMMIT DROP"
    )
    driver: Any = connection.connection.driver_connection
    with driver.cursor() as cursor, cursor.copy(f"COPY {staging.name} ({columns}) FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)
    upsert = postgresql.insert(table).from_select(list(table.columns.keys()), select(staging))
    keys = list(table.primary_key.columns)
    others = {column.name: upsert.excluded[column.name] for column in table.columns if column not in keys}
    connection.execute(upsert.on_conflict_do_update(index_elements=keys, set_=others))
    connection.exec_driver_sql(f"TRUNCATE {staging.name}")
