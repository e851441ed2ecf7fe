"""Both kinds of databases, for the tests of the index."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.index.database import Database
from everstep.index.location import Location
from postgres_server import Server


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """Where an index may lie: a file that is not there yet, an empty database."""
    if request.param == "sqlite":
        return tmp_path / "everstep.db"
    found: Server = request.getfixturevalue("server")
    return found.database()


@pytest.fixture(scope="module")
def both(server: Server) -> list[Database]:
    """An empty index of each kind."""
    return [Database(None), Database(server.database())]
