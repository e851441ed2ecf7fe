"""Both kinds of databases, for the tests of the index."""

from __future__ import annotations

from pathlib import Path

import pytest
from index_runs import make_runs

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


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: good, long, killed, failed and stopped ones; no test changes them."""
    folder = tmp_path_factory.mktemp("made")
    make_runs(folder)
    return folder


@pytest.fixture(scope="module")
def both(server: Server) -> list[Database]:
    """An empty index of each kind."""
    return [Database(None), Database(server.database())]
