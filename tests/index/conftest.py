"""Both kinds of databases, for the tests of the index."""

from __future__ import annotations

from pathlib import Path

import pytest

import gate
from everstep.index.database import Database
from everstep.index.location import Location
from postgres_server import Server
from waiting import PATIENCE


def pytest_itemcollected(item: pytest.Function) -> None:
    """In the gate SQLite answers alone where both kinds are asked the same, but for a few tests."""
    if "place" in item.fixturenames and item.get_closest_marker("campaign") is None:
        item.add_marker(pytest.mark.campaign("machine", gate=99))


@pytest.fixture(autouse=True)
def patient_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training waits for its index, however slow the machine is."""
    for name in ("shipping_thread.PATIENCE", "shipping_thread.FILE_PATIENCE"):
        monkeypatch.setattr(f"everstep.index.{name}", PATIENCE)


@pytest.fixture(params=["sqlite", "postgres"] if gate.is_campaign else ["sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """Where an index may lie: a file that is not there yet, an empty database."""
    if request.param == "sqlite":
        return tmp_path / "everstep.db"
    found: Server = request.getfixturevalue("server")
    return found.database()


@pytest.fixture
def database(place: Location) -> Database:
    return Database(place)
