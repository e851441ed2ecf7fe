"""An index of an older version is brought to this one; where it lies, and what that needs."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from index_runs import everything, index_rows

from everstep.errors import ConfigError, RunIndexError
from everstep.index.database import Database
from everstep.index.fields import fields_of
from everstep.index.location import Location
from everstep.index.location import as_location as place_of
from everstep.index.run_queries import all_runs
from everstep.index.shipping import sync
from everstep.index.sql_tables import VERSION

FIXTURE = Path(__file__).parent / "fixtures" / "index-version-1.sql"
OLD = {
    "runs": "name, path, created, seed, status, reason, started, heartbeat, step, epoch",
    "segments": "*",
    "series": "*",
    "metrics": "*",
    "events": "*",
    "checkpoints": 'run, segment, "offset", name, bytes, time',
    "evaluations": "*",
}


LAGGING = FIXTURE.with_name("index-version-2.sql")
"""Of runs with a row each 10 steps: one ended after 25, one failed after 26, one went on from 14 to 18."""


def test_version_2_is_migrated_and_knows_how_far_each_run_came(tmp_path: Path) -> None:
    path = index_of(LAGGING, tmp_path)
    assert ask(path, "SELECT name, step FROM runs ORDER BY name") == [
        ("again-e8b394", 14),
        ("ended-4eaf29", 20),
        ("failed-8a204c", 20),
    ]
    with Database(path).read() as connection:
        found = {run["name"]: run["step"] for run in all_runs(connection)}
    assert found == {"again-e8b394": 18, "ended-4eaf29": 25, "failed-8a204c": 24}  # 24: its last checkpoint
    assert ask(path, "SELECT run, number, step FROM segments") == [
        (1, 1, 14),
        (1, 2, 18),
        (2, 1, 25),
        (3, 1, 24),
    ]
    assert ask(path, "SELECT DISTINCT diverged FROM runs") == [(None,)]


def test_version_2_is_migrated_in_both_databases(place: Location, made: Path) -> None:
    sync(Database(place), [made])
    now = everything(place)
    with Database(place).write() as connection:
        connection.exec_driver_sql("ALTER TABLE runs DROP COLUMN diverged")
        connection.exec_driver_sql("UPDATE segments SET step = 0 WHERE status IS NOT NULL")
        connection.exec_driver_sql(
            "PRAGMA user_version = 2" if isinstance(place, Path) else "UPDATE version SET number = 2"
        )
    assert everything(place) == now
    with Database(place).read() as connection:
        assert {run["diverged"] for run in all_runs(connection)} == {None}


def index_of(dump: Path, folder: Path) -> Path:
    """An index as an older version made it."""
    path = folder / "everstep.db"
    connection = sqlite3.connect(path)
    connection.executescript(dump.read_text())
    connection.close()
    return path


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """An index as version 1 made it."""
    return index_of(FIXTURE, tmp_path)


def ask(path: Path, query: str) -> list[Any]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def content(path: Path) -> dict[str, list[Any]]:
    return {table: ask(path, f"SELECT {columns} FROM {table}") for table, columns in OLD.items()}


def test_version_1_is_migrated_and_loses_nothing(old: Path) -> None:
    before = content(old)
    with Database(old).read() as connection:
        found = all_runs(connection, ["valid_loss", "config.services"])
    assert len(found) == 2 and found[0]["valid_loss"] == 1 / 3
    assert content(old) == before
    assert ask(old, "PRAGMA user_version") == [(VERSION,)]
    assert ask(old, "SELECT DISTINCT host FROM runs") == [("laptop",)]
    assert all(int(name[-8:]) == step for name, step in ask(old, "SELECT name, step FROM checkpoints"))
    newest = ask(old, "SELECT facts FROM segments WHERE run = 1 ORDER BY number")[-1][0]
    fields = ask(old, "SELECT path, kind, number, text FROM fields WHERE run = 1 ORDER BY at")
    assert fields == list(fields_of(json.loads(newest)))
    assert len(index_rows(Database(old), "again")) == 18


def test_migrations_are_loaded_only_when_the_index_is_behind(old: Path) -> None:
    program = """
import sys
from pathlib import Path
from everstep.index.database import Database
def loaded(path):
    with Database(path).write():
        return "alembic" in sys.modules
print(loaded(Path(sys.argv[1])), loaded(Path(sys.argv[2])))
"""
    new = old.parent / "new.db"
    for expected in ("False True", "False False"):
        done = subprocess.run(
            [sys.executable, "-c", program, str(new), str(old)], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == expected


def test_a_migration_is_done_once_by_however_many(old: Path) -> None:
    program = "import sys; from pathlib import Path; from everstep.index.database import Database\n"
    program += "with Database(Path(sys.argv[1])).read() as c:\n"
    program += "    print(c.exec_driver_sql('PRAGMA user_version').scalar())"
    started = [
        subprocess.Popen([sys.executable, "-c", program, str(old)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [process.communicate()[0] for process in started] == [f"{VERSION}\n"] * 3


@pytest.mark.parametrize("url", ["mysql://me@host/db", "sqlite:///runs.db", "postgresql+asyncpg://host/db"])
def test_a_url_of_something_else(url: str) -> None:
    with pytest.raises(ConfigError, match="give a file, or postgresql://"):
        place_of(url)


def test_a_url_that_cannot_be_read_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        Database("postgresql://me:secret@host:port/db")
    assert "secret" not in str(caught.value)


def test_without_psycopg_the_remedy_is_said() -> None:
    program = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "psycopg" else find(name, *rest)
from everstep.index.database import Database
try:
    Database("postgresql://me@host/db")
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert done.stdout.startswith(RunIndexError.__name__)
    assert "pip install 'everstep[postgres]'" in done.stdout
