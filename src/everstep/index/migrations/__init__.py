"""Migrations of an index from older versions: a module `to_N` for each version.

These modules are imported only if an index is of an older version.
"""

from __future__ import annotations

from importlib import import_module

from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection

from everstep.index.sql_tables import VERSION


def migrate(connection: Connection, found: int) -> None:
    """Migrate the tables from version `found`, version by version, in the transaction of `connection`."""
    operations = Operations(MigrationContext.configure(connection))
    for version in range(found + 1, VERSION + 1):
        import_module(f"{__name__}.to_{version}").upgrade(operations)
