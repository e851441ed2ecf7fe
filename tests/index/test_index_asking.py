"""`everstep.query`: where an index lies; the collections, on both databases; names that nothing has."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from index_runs import index_rows, journal_rows, written

import everstep
from everstep.cli.runs import sql_command
from everstep.errors import ConfigError, RunIndexError
from everstep.index.database import SCHEMA, Database
from everstep.index.location import as_location
from everstep.index.query import COLLECTIONS
from everstep.index.shipping import sync
from everstep.index.sql_tables import VERSION
from everstep.record import Block, Journal, RunDir
from postgres_server import Server


def same(value: Any) -> str:
    """A value as text, in which NaN equals itself."""
    return json.dumps(value, sort_keys=True)


@pytest.mark.parametrize("phase", ["tail", "eval/valid"])
def test_a_metric_is_found_by_its_phase_where_names_have_slashes(tmp_path: Path, phase: str) -> None:
    run = RunDir.open(tmp_path / "run", seed=1)
    journal = Journal.open(run.path, 1, None, {})
    values = {"Loss/train": 0.25, "loss": 0.5, "a//b/": 0.75}
    for name, value in values.items():
        journal.append(Block(1, phase, name, False, [1], [value], [1], [0]))
    journal.close()
    for name, value in values.items():
        for asked in (name, f"{phase}/{name}"):
            (found,) = everstep.query("runs", {asked: value}, fields=[asked], index=tmp_path)
            assert found == {asked: value}
    with pytest.raises(ConfigError, match="no run has 'train'"):
        everstep.query("runs", {"train": 1}, index=tmp_path)


def test_everything_can_be_asked_for_and_both_say_the_same(
    made: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # runs of the current directory are looked at, too
    url = server.database()
    sync(Database(url), [made])
    for places in (made, url):
        names = [
            run["name"].rpartition("-")[0]
            for run in everstep.query("runs", {"status": "finished"}, sort="step", index=places)
        ]
        assert names == ["good", "long"]
    shown = ["name", "valid_loss", "step/loss", "config.optimizer.lr", "argv"]
    betas = {"config.optimizer.lr": {"$lt": 0.2}, "config.optimizer.betas": 0.99}
    loss = {"name": "loss", "phase": "step", "step": {"$lt": 3}}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("runs", {"where": {"valid_loss": {"$lte": 0.5}}, "sort": ["-valid_loss", "name"]}),
        ("runs", {"fields": shown, "sort": "name"}),
        ("runs", {"where": betas, "sort": "-name", "limit": 2}),
        ("metrics", {"where": loss, "fields": ["run", "value"]}),
        ("evaluations", {"sort": ["value", "run"], "limit": 5}),
        ("checkpoints", {"where": {"step": {"$gt": 4}}, "sort": ["step", "run"]}),
        *((collection, {"limit": 10**30}) for collection in COLLECTIONS),
    ]
    for collection, arguments in asked:
        found = everstep.query(collection, **arguments, index=made)
        assert found
        for one in found, (others := everstep.query(collection, **arguments, index=url)):
            for document in one:
                document.pop("heartbeat", None)  # one index was there meanwhile
        assert same(found) == same(others)
    (one, *_) = everstep.query("runs", {"name": "long"}, index=made)
    assert (
        one["valid_loss"] == 0.25 and one["loss"] >= 0 and one["config"]["optimizer"]["betas"] == [0.9, 0.99]
    )
    assert all(
        row["phase"] == "tail" for row in everstep.query("evaluations", {"name": "valid_loss"}, index=made)
    )


def test_a_run_whose_directory_is_gone_is_found_by_that(tmp_path: Path) -> None:
    path = tmp_path / "everstep.db"
    sync(Database(path), [written(tmp_path / "run")])
    shutil.rmtree(tmp_path / "run")
    assert [run["status"] for run in everstep.query("runs", {"status": "gone"}, index=path)] == ["gone"]
    assert everstep.query("runs", {"status": "finished"}, index=path) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"collection": "run"}, "no collection 'run'; did you mean 'runs'"),
        ({"collection": "runs", "where": {"valid_los": 1}}, "did you mean 'valid_loss'"),
        ({"collection": "runs", "sort": "stpe"}, "did you mean 'step'"),
        ({"collection": "runs", "where": {"status": "finnished"}}, "did you mean 'finished'"),
        ({"collection": "runs", "fields": ["stpe"]}, "did you mean 'step'"),
        ({"collection": "metrics", "where": {"vale": 1}}, "did you mean 'value'"),
        ({"collection": "runs", "limit": -1}, "0 or more"),
        ({"collection": "runs", "fields": "name"}, "a list of names"),
        ({"collection": "runs", "fields": 5}, "fields is a list of names; change 5"),
        ({"collection": "runs", "sort": 5}, "sort is a list of names; change 5"),
        ({"collection": "metrics", "sort": [None]}, r"sort is a list of names; change \[None\]"),
    ],
)
def test_unknown_names_are_errors(made: Path, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        everstep.query(**arguments, index=made)


def test_a_slip_in_the_place_of_an_index_makes_no_file(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for slip in ("rusn", "runs/typo", "no/such"):
        with pytest.raises(RunIndexError, match=f"there is no index {tmp_path / slip}") as told:
            everstep.query("runs", index=tmp_path / slip)
        assert ("did you mean 'runs'" in str(told.value)) == (slip == "rusn")
    assert [path.name for path in tmp_path.rglob("*")] == ["runs"]


def test_a_field_is_the_value_at_its_path(tmp_path: Path) -> None:
    layers = [{"width": 3}, {"width": 5}]
    written(tmp_path / "run", config={"lr": 0.1, "betas": [0.9, 0.99], "layers": layers})
    fields = ["step", "config.lr", "config.betas", "config.layers", "config.layers.width", "loss", "reason"]
    (found,) = everstep.query("runs", fields=fields, index=tmp_path)
    assert list(found.values()) == [3, "done", 0.1, [0.9, 0.99], layers, [3, 5], 0.5]
    assert found.keys() == set(fields)


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
    assert "pip install click sqlalchemy 'psycopg[binary]'" in done.stdout


@pytest.mark.campaign("machine", gate=1)
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_sql_is_answered_and_changes_nothing(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = "everstep.db" if kind == "sqlite" else request.getfixturevalue("server").database()
    sync(Database(as_location(place)), [written(tmp_path / "run")])

    def sql(*asked: str) -> str:
        answer = CliRunner().invoke(sql_command, [*asked, "--index", place], catch_exceptions=False)
        return answer.stdout

    values = "select run, step, value from valid_metrics where step > 1 order by step"
    assert [row["value"] for row in json.loads(sql(values, "--json"))] == [0.5, 0.5]
    assert sql('select status, kills as "100%" from runs').split() == ["status", "100%", "finished", "0"]
    assert "bytes" in sql("select packed from blocks")
    for wrong in ("delete from runs", "select nothing from runs", "selekt 1", "set x = 1", ""):
        with pytest.raises(ConfigError, match=r"does not take this statement|returns no rows; give a SELECT"):
            sql(wrong)
    assert len(everstep.query("runs", index=place)) == 1
