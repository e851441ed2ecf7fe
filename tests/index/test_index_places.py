"""Where an index lies, and what that needs; an index of another version stays as it is."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from index_runs import index_rows, journal_rows, written

import everstep
from everstep.errors import ConfigError, RunIndexError
from everstep.index.database import SCHEMA, Database
from everstep.index.location import as_location
from everstep.index.shipping import sync
from everstep.index.sql_tables import VERSION
from postgres_server import Server


@pytest.mark.parametrize("other", [VERSION - 1, VERSION + 1])
def test_an_index_of_another_version_stays_and_ours_lies_beside_it(tmp_path: Path, other: int) -> None:
    written(tmp_path / "run")
    path = tmp_path / "everstep.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE runs (name)")
    connection.execute(f"PRAGMA user_version = {other}")
    connection.close()
    before = path.read_bytes()
    assert [run["step"] for run in everstep.query("runs", index=tmp_path)] == [3]
    database = Database(path)
    assert database.place == tmp_path / f"everstep-{VERSION}.db"
    assert index_rows(database, "run") == journal_rows(tmp_path / "run")
    assert path.read_bytes() == before


def test_other_schemas_of_a_server_stay_as_they_are(tmp_path: Path, server: Server) -> None:
    url = server.database()
    written(tmp_path / "run")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA everstep_1")
        connection.execute("CREATE TABLE everstep_1.runs (name text)")
        sync(Database(url), [tmp_path])
        there = "SELECT schemaname FROM pg_tables WHERE tablename = 'runs' ORDER BY 1"
        assert connection.execute(there).fetchall() == [("everstep_1",), (SCHEMA,)]
    assert index_rows(Database(url), "run") == journal_rows(tmp_path / "run")


@pytest.mark.parametrize("url", ["mysql://me@host/db", "sqlite:///runs.db", "postgresql+asyncpg://host/db"])
def test_a_url_of_something_else(url: str) -> None:
    with pytest.raises(ConfigError, match="give a file, or postgresql://"):
        as_location(url)


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
