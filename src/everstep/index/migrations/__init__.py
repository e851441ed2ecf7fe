"""Migrations of an index from older versions: a module `to_N` for each version.

Nothing here is imported unless an index is behind.
"""

from __future__ import annotations

from importlib import import_module

from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection

from everstep.index.schema import VERSION


def migrate(connection: Connection, found: int) -> None:
    """Change the tables of version `found` step by step, in the transaction of `connection`."""
    operations = Operations(MigrationContext.configure(connection))
    for version in range(found + 1, VERSION + 1):
        import_module(f"{__name__}.to_{version}").upgrade(operations)
