"""An index of an older version is brought to this one; where it lies, and what that needs."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from struct import pack
from typing import Any

import psycopg
import pytest
from index_runs import everything, index_rows, written
from sqlalchemy import make_url, select

from everstep.errors import ConfigError, RunIndexError
from everstep.index.database import Database
from everstep.index.fields import fields_of
from everstep.index.location import Location
from everstep.index.location import as_location as place_of
from everstep.index.run_queries import all_runs
from everstep.index.shipping import sync
from everstep.index.sql_tables import VERSION, fields, is_label, runs
from everstep.record import Block, Journal, RunDir
from everstep.ui.stored_rows import StoredRows
from postgres_server import Server

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


@pytest.mark.parametrize("place", ["sqlite", "postgres"], indirect=True)
def test_version_2_is_migrated_in_both_databases(place: Location, made: Path) -> None:
    sync(Database(place), [made])
    now = everything(place)
    with Database(place).write() as connection:
        connection.exec_driver_sql("ALTER TABLE runs DROP COLUMN diverged")
        connection.exec_driver_sql("UPDATE segments SET step = 0 WHERE status IS NOT NULL")
        connection.exec_driver_sql("DROP TABLE blocks")
        connection.exec_driver_sql("DROP INDEX labels")
        connection.exec_driver_sql(
            "PRAGMA user_version = 2" if isinstance(place, Path) else "UPDATE version SET number = 2"
        )
    then = everything(place)
    assert without_times(then.pop("blocks")) == without_times(now.pop("blocks"))
    assert then == now
    with Database(place).read() as connection:
        assert {run["diverged"] for run in all_runs(connection)} == {None}


def without_times(blocks: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Rows of blocks, but for the time at which each block was written: older versions did not store it."""
    return [(*place, bytes(packed)[8:]) for *place, packed in blocks]


def test_version_3_is_migrated_in_both_databases_and_its_curves_stay(place: Location, tmp_path: Path) -> None:
    """Version 3 had the times of starts alone: a chart spread the rows of a start evenly between its ends."""
    database, run = Database(place), RunDir.open(tmp_path / "a")
    values = [0.5, -0.0, math.nan, math.inf, 1e-300, 3.0]
    journal = Journal.open(run.path, 1, None, {}, warn=print)
    for first in (1, 3, 5):
        steps = [first, first + 1]
        journal.append(Block(2, "step", "loss", False, steps, values[first - 1 : first + 1], [3, 4], [0, 1]))
        journal.flush()
    sync(database, [run.path])
    now = everything(place)
    with database.write() as connection:
        connection.exec_driver_sql("DROP TABLE blocks")
        connection.exec_driver_sql("DROP INDEX labels")
        connection.exec_driver_sql("UPDATE runs SET path = '/nowhere', host = 'another'")
        connection.exec_driver_sql("UPDATE segments SET started = 1000, last = 1600")
        connection.exec_driver_sql(
            "PRAGMA user_version = 3" if isinstance(place, Path) else "UPDATE version SET number = 3"
        )
    with database.read() as connection:
        (row,) = connection.execute(select(runs)).mappings()
        (found,) = StoredRows().read(database, connection, [row], "step", "loss")
    assert found.steps.tolist() == [1, 2, 3, 4, 5, 6] and found.times.tolist() == [*range(1100, 1700, 100)]
    assert [*map(repr, found.values.tolist())] == [*map(repr, [0.5, 0.0, *values[2:]])]
    plain = [*map(bytes, (place[-1] for place in now["blocks"]))]
    again = [*map(bytes, (place[-1] for place in everything(place)["blocks"]))]
    assert [one[8:] for one in again] == [one[8:].replace(pack("<d", -0.0), pack("<d", 0.0)) for one in plain]
    journal.close()


def test_who_could_read_version_3_can_read_what_it_was_migrated_to(server: Server, tmp_path: Path) -> None:
    url = server.database()
    written(tmp_path / "run")
    sync(Database(url), [tmp_path])
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in (
            'DROP ROLE IF EXISTS "Odd reader"',
            'CREATE ROLE "Odd reader" LOGIN',
            'GRANT USAGE ON SCHEMA everstep TO "Odd reader"',
            "DROP TABLE everstep.blocks",
            "DROP INDEX everstep.labels",
            "UPDATE everstep.version SET number = 3",
            'GRANT SELECT ON ALL TABLES IN SCHEMA everstep TO "Odd reader"',
        ):
            connection.execute(statement)  # type: ignore[arg-type]
    with Database(url).write():
        pass
    reading = make_url(url).set(username="Odd reader").render_as_string(hide_password=False)
    with Database(reading).read() as found:
        assert found.exec_driver_sql("SELECT count(*) FROM blocks").scalar_one() == 1
        may = "SELECT has_table_privilege('Odd reader', 'everstep.blocks', 'INSERT')"
        assert found.exec_driver_sql(may).scalar_one() is False


def test_labels_are_found_without_a_look_at_every_row_of_the_records() -> None:
    with Database(None).read() as connection:
        asked = "SELECT run FROM fields WHERE path IN ('tags', 'note')"
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {asked}").all()
        assert "USING INDEX labels" in plan[0][-1], plan
        said = str(select(fields.c.run).where(is_label).compile(connection, compile_kwargs=LITERAL))
        assert " ".join(said.split()).replace("fields.", "") == asked


LITERAL = {"render_postcompile": True}


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


@pytest.mark.campaign("long")
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


@pytest.mark.campaign("random")
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
