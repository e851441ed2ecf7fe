"""`everstep.query`: where an index lies; the collections, on both databases; wrong names; answers."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import sqlite3
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from index_runs import index_rows, indexed, journal_rows, written

import everstep
from everstep.cli.runs import sql_command
from everstep.display.html import Chart, draw_svg
from everstep.errors import ConfigError, RunIndexError
from everstep.index.database import SCHEMA, Database
from everstep.index.location import as_location
from everstep.index.query import COLLECTIONS, Documents
from everstep.index.run_queries import RunColumns
from everstep.index.shipping import sync
from everstep.index.sql_tables import VERSION
from everstep.record import Block, Journal, RunDir
from postgres_server import Server
from tiny_runs import Tiny


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


def test_a_column_is_made_once_for_all_runs(tmp_path: Path) -> None:
    columns = RunColumns(Database(indexed(tmp_path) / "everstep.db"))
    for name in ("name", "status", "step", "config.optimizer.lr", "loss"):
        assert columns.values(name) is columns.values(name), "a filter asks at each of 10,000 runs"


def test_of_everything_that_is_asked_both_say_the_same(made, server: Server, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # runs of the current directory are looked at, too
    url = server.database()
    sync(Database(url), [made])
    for places in (made, url):
        found = everstep.query("runs", {"status": "finished"}, sort="step", index=places)
        assert [run["name"].rpartition("-")[0] for run in found] == ["good", "long"]
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
    assert RunColumns(Database(url)).telling_metric() == "valid_loss"
    (one, *_) = everstep.query("runs", {"name": "long", "duration": {"$gt": 0}}, index=url)
    assert one["valid_loss"] == 0.25 and one["loss"] >= 0
    assert one["config"]["optimizer"]["betas"] == [0.9, 0.99]
    assert {x["phase"] for x in everstep.query("evaluations", {"name": "valid_loss"}, index=made)} == {"tail"}


def test_a_run_whose_directory_is_gone_is_found_by_that(tmp_path: Path) -> None:
    path = tmp_path / "everstep.db"
    sync(Database(path), [written(tmp_path / "run")])
    shutil.rmtree(tmp_path / "run")
    assert [run["status"] for run in everstep.query("runs", {"status": "gone"}, index=path)] == ["gone"]
    assert everstep.query("runs", {"status": "finished"}, index=path) == []


@pytest.mark.parametrize(("arguments", "said"), [
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
])  # fmt: skip
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


def test_a_url_of_something_else_and_one_that_cannot_be_read() -> None:
    for url in ("mysql://me@host/db", "sqlite:///runs.db", "postgresql+asyncpg://host/db"):
        with pytest.raises(ConfigError, match="give a file, or postgresql://"):
            as_location(url)
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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(RunIndexError.__name__)
    assert "pip install click sqlalchemy 'psycopg[binary]'" in done.stdout


@pytest.mark.campaign("machine", gate=1)
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_sql_is_answered_and_changes_nothing(tmp_path, kind, request, monkeypatch) -> None:
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


HOSTILE = "<img src=x onerror=alert(1)>\u202e&amp;"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one of them with a hostile name; no test changes them."""
    folder = tmp_path_factory.mktemp("runs")
    for name, rate in (("plain", 0.1), (HOSTILE, 0.2)):
        config = {"optimizer": {"lr": rate, "betas": [0.9, 0.99]}, "said": HOSTILE}
        Tiny(folder / name, max_epoch=2, config=config).train(
            tail=lambda loop, epoch: loop.collect_metrics(**{"valid_loss": 1 / epoch, HOSTILE: epoch})
        )
    return folder


def query(folder: Path, collection: str, where: Any = None, **how: Any) -> Documents:
    return everstep.query(collection, where, index=folder, **how)


def test_an_event_of_the_program_sets_no_column_of_a_checkpoint(tmp_path: Path) -> None:
    forged = {"name": "mine", "bytes": 1, "time": "noon", "run": "another", "step": 9}
    Tiny(tmp_path / "run", max_epoch=1).train(
        inside=lambda loop, step: loop.note("checkpoint", forged) if step == 2 else None
    )
    (row,) = query(tmp_path, "checkpoints", {"name": "mine"})
    assert row["run"].startswith("run-") and (row["step"], type(row["time"])) == (0, float)


def charts(html: str) -> list[ET.Element]:
    """The charts, parsed as strict XML."""
    return [ET.fromstring(base64.b64decode(one)) for one in re.findall(r'svg\+xml;base64,([^"]+)"', html)]


def test_an_answer_is_a_list_of_dictionaries_and_a_frame_with_a_column_for_each_value(folder: Path) -> None:
    rows = query(folder, "metrics", {"name": "loss", "phase": "step"}, fields=["step", "value"])
    assert rows == [dict(one) for one in rows] and rows.columns == ("step", "value")
    frame = query(folder, "runs", sort="config.optimizer.lr").to_pandas()
    assert list(frame["config.optimizer.lr"]) == [0.1, 0.2]
    assert list(frame["step"]) == [8, 8] and list(frame["valid_loss"]) == [0.5, 0.5]
    assert list(frame.columns[:2]) == ["name", "status"] and "config" not in frame.columns
    assert frame["config.optimizer.betas"][0] == [0.9, 0.99]
    found = query(folder, "metrics", {"name": "loss"})
    frame = found.to_pandas()
    assert [x.hex() for x in frame["value"]] == [row["value"].hex() for row in found]
    assert frame.dtypes["step"] == "int64" and len(frame) == len(found) > 0


def test_a_frame_has_what_runs_are_sorted_and_filtered_by_and_its_times_are_datetimes(folder: Path) -> None:
    where = {"step/loss": {"$gte": 0}, "config.optimizer": {"$exists": True}, "config.said": HOSTILE}
    rows = query(folder, "runs", where, sort="best/valid_loss")
    frame, same = rows.to_pandas(), rows.to_polars()
    assert list(frame.columns) == same.columns and not {"config.optimizer", "config"} & {*frame.columns}
    assert list(frame["best/valid_loss"]) == [0.5, 0.5] and frame["step/loss"].notna().all()
    assert list(frame.columns[5:8]) == ["step/loss", "config.said", "best/valid_loss"]
    assert str(frame["created"].dt.tz) == str(same["created"].dtype.time_zone) == "UTC"  # type: ignore[attr-defined]
    for name in ("created", "started", "heartbeat"):
        seconds = pytest.approx([row[name] for row in rows])
        assert [time.timestamp() for time in frame[name]] == seconds
        assert [time.timestamp() for time in same[name]] == seconds
    assert str(query(folder, "checkpoints").to_pandas()["time"].dt.tz) == "UTC"
    run = everstep.runs.show(folder / "plain").starts.to_pandas()
    assert ((run["last"] - run["started"]).dt.total_seconds() - run["duration"]).abs().max() < 1e-5
    later = Documents([{"started": None, "time": 2.5}, {"started": 0.0, "time": 3}]).to_pandas()
    assert later["started"].isna().tolist() == [True, False] and list(later["time"]) == [2.5, 3], "a metric"


def test_polars_has_the_same_frame(folder: Path) -> None:
    found = query(folder, "metrics", {"name": "loss"})
    frame = found.to_polars()
    assert frame.columns == list(found.to_pandas().columns) and frame.height == len(found) > 0
    assert [x.hex() for x in frame["value"]] == [row["value"].hex() for row in found]
    runs = query(folder, "runs", sort="config.optimizer.lr")
    assert runs.to_polars()["config.optimizer.lr"].to_list() == [0.1, 0.2]
    assert runs.to_polars()["config.optimizer.betas"].to_list() == [[0.9, 0.99]] * 2
    mixed = Documents([{"a": 1}, {"a": 2.5, "b": 1}, {"b": "x"}]).to_polars()
    assert mixed["a"].to_list() == [1.0, 2.5, None] and mixed["b"].to_list() == [None, "1", "x"]


def test_no_documents_are_a_frame_with_the_columns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = query(folder, "metrics", {"name": "nothing"}, fields=["run", "value"])
    assert list(found.to_pandas().columns) == ["run", "value"]
    assert found._repr_html_() == "<p>no documents</p>" and found.to_polars().columns == ["run", "value"]
    for package in ("pandas", "polars"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ConfigError, match=f"not installed: pip install {package}"):
            getattr(found, f"to_{package}")()


def test_a_notebook_shows_tables_and_charts_of_metrics(folder: Path) -> None:
    html = query(folder, "runs", {"config.optimizer.lr": {"$gt": 0}})._repr_html_()
    assert html.count("<tr>") == 3 and "<img" not in html
    for text in ("plain-", "finished", "valid_loss", "config.optimizer.lr", "0.2"):
        assert text in html
    html = query(folder, "metrics")._repr_html_()
    titles = ["".join(chart.itertext()).split("loss")[0] for chart in charts(html)]
    assert titles[:2] == ["epoch/", "step/"] and len(titles) == 4
    marks = [one for one in charts(html)[1].iter() if one.tag.endswith("path") and one.get("stroke-width")]
    assert len(marks) == 4, "a line and its mark in the legend, for each run"
    assert "step/loss by step" in html and "8 points, last" in html and "more rows" in html


def test_names_are_data_never_markup(folder: Path) -> None:
    for collection in ("runs", "metrics", "evaluations", "checkpoints"):
        html = query(folder, collection)._repr_html_()
        tags, attributes = re.findall(r"<(\w+)", html), re.findall(r"\s([\w-]+)=\"", html)
        assert set(tags) <= {"table", "thead", "tbody", "tr", "th", "td", "p", "b", "img"}
        assert set(attributes) <= {"align", "alt", "src"} and "\u202e" not in html
        assert collection == "checkpoints" or "&lt;img src=x onerror=alert(1)&gt;" in html
        for chart in charts(html):
            tags = [each.tag.rpartition("}")[2] for each in chart.iter()]
            assert set(tags) <= {"svg", "text", "path", "circle"}
            assert not {name for each in chart.iter() for name in each.attrib} & {"href", "onload", "style"}


@pytest.mark.parametrize(("values", "said"), [
    ([math.nan, math.inf], "no finite value|a (2 not finite)"),
    ([1e308, -1e308], "-1e+308"), ([0.25], "0.25|0|step"), ([5e-324, 0.0], "a"),
    ([3.0, math.nan, 3.0], "a (1 not finite)"),
])  # fmt: skip
def test_any_value_can_be_drawn(values: list[float], said: str) -> None:
    svg = draw_svg(Chart("a", {"a": list(enumerate(values))}))
    assert said in "|".join(ET.fromstring(svg).itertext())
    assert not re.search("nan|inf", svg.replace("not finite", "").replace("no finite", ""))
