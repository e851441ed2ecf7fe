"""Both kinds of databases, for the tests of the index."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.index.location import Place
from postgres_server import Server, running_server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A PostgreSQL server that nobody stops."""
    with running_server() as found:
        yield found


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Where an index may lie: a file that is not there yet, an empty database."""
    if request.param == "sqlite":
        return tmp_path / "everstep.db"
    found: Server = request.getfixturevalue("server")
    return found.database()
