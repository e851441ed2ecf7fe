"""Runs that somebody has sent, valid and yet hostile: the page answers, tells it, and serves the others."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from page_server import running_page
from test_journal_reading import WRONG  # of tests/record
from test_run_page import block, written, wrote

import everstep
from everstep.errors import ConfigError
from everstep.index.database import Database
from everstep.index.run_queries import run_rows
from everstep.index.shipping import sync
from everstep.record import RunDir
from everstep.record.rundir import _encode
from everstep.ui.one_run import LONGEST_TEXT, MissingError, content_of, one_run, summaries_of
from everstep.ui.runs_table import ListOptions, RunsTable
from everstep.ui.server import Json
from everstep.untrusted_files import LONGEST_ID


def shipped(folder: Path) -> Database:
    """The index of a folder of runs."""
    database = Database(folder / "everstep.db")
    sync(database, [folder])
    return database


def pages(database: Database) -> dict[str, Any]:
    """What the page shows of each run, by the name of its directory, as a browser gets it."""
    with database.read() as connection:
        rows = run_rows(connection).values()
    answers = {Path(run["path"]).name: Json(one_run(database, run)).body for run in rows}
    return {name: json.loads(body) for name, body in answers.items()}


def test_events_of_wrong_types_are_told_and_shown_nowhere(tmp_path: Path) -> None:
    for number, (kind, data, _) in enumerate(WRONG):
        written(tmp_path / str(number), wrote(block([1.0]), events=[(kind, data)]))
    found = pages(shipped(tmp_path))
    assert len(found) == len(WRONG)
    for number, (kind, _, told) in enumerate(WRONG):
        answer = found[str(number)]
        assert [told in one and kind in one for one in answer["problems"]] == [True]
        assert (answer["rollbacks"], answer["summaries"]) == ([], [])
        with pytest.warns(RuntimeWarning, match="is not an event"):
            assert everstep.runs.show(tmp_path / str(number)).facts["problems"] == answer["problems"]


def test_a_file_in_place_of_the_checkpoints_is_told(tmp_path: Path) -> None:
    run = written(tmp_path / "a", wrote(block([1.0])))
    (run / "checkpoints").write_text("x")
    (answer,) = pages(shipped(tmp_path)).values()
    assert answer["checkpoints"] == []
    assert "Not a directory" in answer["problems"][0]


@pytest.mark.campaign("long")
def test_a_long_id_is_no_run_and_a_fault_is_told_in_short(tmp_path: Path) -> None:
    written(tmp_path / "good", wrote(block([1.0])))
    facts = {**RunDir.open(tmp_path / "long").facts, "id": "a:" * 50_000 + "@"}
    (tmp_path / "long" / "run.json").write_bytes(_encode(facts))
    RunDir.open(tmp_path / "longest", about={"id": "b" * LONGEST_ID})
    torn = tmp_path / "longest" / "journal" / "segment-0001.evj"
    torn.parent.mkdir()
    torn.write_bytes(b"torn" * 10)
    with running_page(tmp_path) as page:
        answer = page.get("/api/runs")
        assert len(answer.body) < 20_000
        assert {row["name"][:4] for row in answer.json["rows"]} == {"good", "bbbb"}
        problems = "\n".join(answer.json["problems"])
        assert "long/run.json is damaged: its checksum is wrong, or a fact is missing or too long" in problems


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("ends", [b"", b"\r\n\r\n"])
def test_a_head_of_a_request_has_a_limit(tmp_path: Path, ends: bytes) -> None:
    written(tmp_path / "good", wrote(block([1.0])))
    with running_page(tmp_path) as page:
        line = socket.create_connection(("127.0.0.1", page.port))
        with line, contextlib.suppress(ConnectionError):
            line.sendall(b"GET / HTTP/1.1\r\nX: " + b"a" * 200_000 + ends)
            assert line.recv(12) == b"HTTP/1.1 400"


def test_a_metric_hides_no_setting_of_other_runs(tmp_path: Path) -> None:
    for number in (1, 2):
        facts = {"config": {"lr": 0.1 * number}, "sweep": "s1"}
        written(tmp_path / str(number), wrote(block([1.0])), facts=facts)
    odd = [block([5.0], name) for name in ("config.lr", "sweep", "tags")]
    written(tmp_path / "hostile", wrote(*odd))
    database = shipped(tmp_path)
    table = RunsTable(database)
    assert sorted(table.first("config.lr").values()) == [0.1, 0.2, 5.0], "its own alone"
    found = table.listed(ListOptions(filter="config.lr<0.15", columns=["config.lr", "sweep"]))
    assert [row["values"] for row in found["rows"]] == [{"config.lr": 0.1, "sweep": "s1"}]
    by_path = sorted(table.rows.values(), key=lambda row: row["path"])
    assert {"name": "config.lr", "values": [0.1, 0.2, None]} in table.compared(by_path)["settings"]
    assert len(everstep.query("runs", {"config.lr": {"$lt": 0.15}}, index=tmp_path)) == 1


@pytest.mark.campaign("long")
def test_a_hundred_thousand_settings_are_no_answer(tmp_path: Path) -> None:
    many = {f"setting_{number:06}": number for number in range(100_000)}
    written(tmp_path / "hostile", wrote(block([1.0])), facts={"config": many})
    for number in (1, 2):
        written(tmp_path / str(number), wrote(block([1.0])), facts={"config": {"lr": number}})
    database = shipped(tmp_path)
    table = RunsTable(database)
    answer = table.listed(ListOptions())
    assert len(Json(answer).body) < 100_000
    compared = table.compared(list(table.rows.values()))
    assert len(Json(compared).body) < 200_000
    assert "config.lr" in {row["name"] for row in compared["settings"]}
    begun = time.process_time()
    with pytest.raises(ConfigError, match=r"did you mean 'config.lr'\?.* more") as error:
        table.listed(ListOptions(sort="config.lrr"))
    assert time.process_time() - begun < 1 and len(str(error.value)) < 20_000


def test_a_long_text_is_cut_and_odd_names_of_files_are_refused(tmp_path: Path) -> None:
    odd = ["a" * 5000, "\ud800", "a\0b", "linked/x.png"]
    events: list[tuple[str, Any]] = [("summary", {"name": "text", "step": 1, "text": "word " * (1 << 20)})]
    events += [("summary", {"name": str(at), "step": 1, "image": {"file": odd[at]}}) for at in range(4)]
    run = written(tmp_path / "a", wrote(block([1.0]), events=events))
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (run / "linked").symlink_to(tmp_path / "secret")
    database = shipped(tmp_path)
    with database.read() as connection:
        (row,) = run_rows(connection).values()
    summaries = summaries_of(database, row["id"])
    text, _ = content_of(database, row, summaries["text", "text"][1])
    assert len(text) < LONGEST_TEXT + 100 and text.endswith(b"characters more")
    for at in range(4):
        with pytest.raises(MissingError, match=r"cannot be read|does not lie in the run"):
            content_of(database, row, summaries[str(at), "image"][1])
