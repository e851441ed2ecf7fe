"""The list of runs and its live events, over real runs that were killed, stopped and resumed."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from index_runs import indexed, start, train, written
from page_server import Page, running_page

from everstep.index import shipping
from everstep.record import RunDir
from everstep.record.journal_format import segment_path
from everstep.testing import ManualClock
from everstep.ui import STATIC, server
from everstep.ui.curves import CurveOptions, curves
from everstep.ui.runs_table import run_id
from everstep.ui.server import FollowedIndex
from tiny_runs import Tiny


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [row["name"] for row in rows]


def test_a_filter_has_the_words_of_everstep_runs_or_mongodbs_language(page: Page) -> None:
    for text, expected in {
        "": ["failed", "good", "killed", "long", "stopped"],
        "ood status=finished": ["good"],
        "best/valid_loss<0.4 kills>0": ["long"],
        '{"$or": [{"status": "failed"}, {"valid_loss": {"$lt": 0.4}}]}': ["failed", "long"],
    }.items():
        found = page.get("/api/runs", where=text, sort="name").json
        assert [name.rpartition("-")[0] for name in names(found["rows"])] == expected
        assert (found["matched"], found["total"]) == (len(expected), 5)


@pytest.mark.campaign("long")
def test_columns_pages_and_order(page: Page) -> None:
    columns = "valid_loss,status,started,name,config.optimizer.betas"
    asked = {"columns": columns, "sort": "valid_loss", "desc": "1"}
    found = page.get("/api/runs", **asked).json
    assert [column["kind"] for column in found["columns"]] == ["number", "status", "time", "text", "text"]
    values = [row["values"].get("valid_loss") for row in found["rows"]]
    there = [value for value in values if value is not None]
    assert there == sorted(there, reverse=True) and len(there) >= 2  # runs without the value come last
    assert values[len(there) :] == [None] * (5 - len(there))
    assert found["rows"][0]["values"]["config.optimizer.betas"] == "[0.9, 0.99]"
    pages = [page.get("/api/runs", **asked, offset=at, limit=2).json for at in (0, 2, 4)]
    assert [row for one in pages for row in names(one["rows"])] == names(found["rows"])
    newest = page.get("/api/runs").json["rows"]
    started = [row["values"]["started"] for row in newest]
    assert started == sorted(started, reverse=True)
    by_name = {row["name"].rpartition("-")[0]: row for row in newest}
    assert by_name["killed"]["status"] == "killed" and by_name["long"]["status"] == "finished"
    assert by_name["long"]["heartbeat"] >= 0


def test_the_columns_that_nobody_chose_tell_most(page: Page) -> None:
    answer = page.get("/api/runs").json
    assert [column["name"] for column in answer["columns"]] == [
        "name", "status", "verified", "best/valid_loss", "step", "epoch", "started"
    ]  # fmt: skip
    long = next(row["values"] for row in answer["rows"] if row["name"].startswith("long-"))
    assert (long["verified"], long["best/valid_loss"]) == ("verified", 0.25)
    asked = page.get("/api/runs", columns="starts,kills,verified,valid_loss,best/tail/valid_loss").json
    long = next(row["values"] for row in asked["rows"] if row["name"].startswith("long-"))
    assert list(long.values()) == [2, 1, "verified", 0.25, 0.25]
    by_duration = page.get("/api/runs", where="long duration>0", columns="duration", sort="duration").json
    assert by_duration["columns"] == [{"name": "duration", "kind": "duration"}]
    (row,) = by_duration["rows"]
    run = page.get(f"/api/runs/{row['id']}").json
    seconds = sum(start["duration"] for start in run["starts"])
    assert run["duration"] == row["values"]["duration"] == pytest.approx(seconds)


def test_best_values_and_settings_that_differ_are_among_the_columns(tmp_path: Path) -> None:
    for name, rate, same in (("sweep-a", 0.1, 1), ("sweep-b", 0.2, 1), ("other", 0.2, 2)):
        tail = lambda loop, epoch: loop.collect_metrics(alpha=1.0, f1=1 / epoch)  # noqa: E731
        options: Any = {"watch": ("f1", "max"), "config": {"lr": rate, "same": same}}
        Tiny(tmp_path / "runs" / name, max_epoch=2, **options).train(tail=tail)
    with running_page(tmp_path / "runs") as page:
        answer = page.get("/api/runs").json
        assert [row["values"]["best/f1"] for row in answer["rows"]] == [1.0, 1.0, 1.0]
        assert {"config.lr", "config.same"} <= {column["name"] for column in answer["columns"]}
        shown = {column["name"] for column in page.get("/api/runs?where=sweep").json["columns"]}
        assert "config.lr" in shown and not {"config.same", "alpha"} & shown


def test_wrong_questions_are_told_what_to_do(page: Page) -> None:
    for asked, told in (
        ({"where": "valid_los<1"}, "did you mean 'valid_loss'"),
        ({"where": "optimizer.lr=1"}, "did you mean 'config.optimizer.lr'"),
        ({"where": "best/train_time<1"}, "no run has 'best/train_time'"),
        ({"where": "{"}, "is not JSON"),
        ({"sort": "../../etc/passwd"}, "no run has"),
        ({"columns": "name,<script>"}, "no run has '<script>'"),
        ({"limit": "-1"}, "limit is an integer from 1 to 10000"),
        ({"where": "a" * 10_001}, "where is a filter of at most 10,000 characters"),
        ({"offset": "9" * 30}, "offset is an integer"),
        ({"desc": "yes"}, "desc is 0 or 1"),
        ({"filter": "step>1"}, "no parameter 'filter'"),
    ):
        answer = page.get("/api/runs", **asked)
        assert answer.status == 400 and told in answer.json["error"]


def test_markup_in_names_stays_data(tmp_path: Path) -> None:
    evil = '</script><img src=x onerror="alert(1)">'
    RunDir.open(tmp_path / "runs" / "a", about={"id": evil})
    RunDir.open(tmp_path / "runs" / "b", about={"id": "\x1b[31mé/../../x"})
    RunDir.open(tmp_path / "runs" / "c", about={"id": ".."})
    with running_page(tmp_path / "runs") as page:
        answer = page.get("/api/runs")
        assert {row["name"] for row in answer.json["rows"]} == {evil, "\x1b[31mé/../../x", ".."}
        assert answer.headers["content-type"] == "application/json"
        assert {row["id"] for row in answer.json["rows"]} == {"~1", "~2", "~3"}  # ids fit into an address


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    """What a change of a file would change; of the runs that nobody trains, and not of the index."""
    paths = [path for path in folder.rglob("*") if not re.search("everstep.db|killed", str(path))]
    found = {str(path): path.lstat() for path in paths}
    return {path: (one.st_mtime_ns, one.st_size, one.st_ino) for path, one in found.items()}


@pytest.mark.campaign("long")
def test_looking_at_a_run_neither_changes_nor_locks_it(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(made, folder, ignore=shutil.ignore_patterns("everstep.db*"))
    before = snapshot(folder)
    with running_page(folder) as page:
        assert page.get("/api/runs").json["total"] == 5
        time.sleep(1)  # for looks at the journals
        assert train(folder / "killed", 4) == 0  # nobody holds it
        del page
    assert snapshot(folder) == before


@pytest.mark.campaign("long")
def test_a_run_directory_alone_is_read_without_an_index(made: Path) -> None:
    with running_page(made / "good") as page:
        assert [name.rpartition("-")[0] for name in names(page.get("/api/runs").json["rows"])] == ["good"]
    assert not (made / "good" / "everstep.db").exists()


def test_an_index_of_many_runs_is_shown_before_journals_are_read(tmp_path: Path, monkeypatch: Any) -> None:
    indexed(tmp_path)
    written(tmp_path / "another")
    monkeypatch.setattr(server, "_MANY", 1)
    index = FollowedIndex(str(tmp_path))
    shown = len(index.table.rows), index.version
    index.refresh()
    assert (shown, len(index.table.rows), index.version) == ((1, 1), 2, 2)


def test_a_look_at_all_journals_waits_for_curves_being_computed(tmp_path: Path, monkeypatch: Any) -> None:
    """A look at 10,000 runs takes seconds, and doubled the time of an overlay."""
    indexed(tmp_path)
    index, waits, looked = FollowedIndex(str(tmp_path)), threading.Event(), list[str]()

    class Noted(threading.Condition):
        def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
            if not predicate():
                waits.set()
            return super().wait_for(predicate, timeout)

    def look() -> None:
        index.refresh()
        waits.set()  # or the test would hang where a look does not wait

    index._no_curve, index._next_look = Noted(), 0.0
    id_at = shipping.id_at
    monkeypatch.setattr(shipping, "id_at", lambda path: looked.append("looked") or id_at(path))
    other = threading.Thread(target=look)
    with index.first():
        other.start()
        waits.wait()
        looked.append("curves")
    other.join()
    assert looked[:2] == ["curves", "looked"]


@pytest.mark.parametrize(("seconds", "young", "old"), [(0.5, 2, 19), (0.125, 11, 11)])
def test_a_point_is_on_the_page_in_two_seconds(tmp_path: Path, seconds: float, young: int, old: int) -> None:
    """By a clock that the steps move; an old run of slow steps hands its rows over after 10 s, in blocks."""
    clock, folder, late = ManualClock(), tmp_path / "runs", list[int]()
    followed: list[FollowedIndex] = []
    pause = re.search(r"const PAUSE = (\d+);", (STATIC / "api.js").read_text())
    assert pause and int(pause[1]) <= 500, "milliseconds between two questions of the page"

    def inside(loop: Any, step: int) -> None:
        followed.append(followed[0] if followed else FollowedIndex(str(folder)))
        (run,) = followed[0].table.rows.values()
        followed[0].sizes([run_id(run)])  # what the page asks for
        (line,) = curves(followed[0].database, [run], CurveOptions("step", "loss"))["series"]
        late.append(step - 1 - max([0, *line["x"]]))
        clock.advance(3600.0 if step == 20 else seconds)

    Tiny(folder / "a", samples=400, max_epoch=1, clock=clock).train(inside)
    assert max(late[:20]) == young and max(late[130:]) == old, "steps"


@pytest.mark.campaign("timed")
@pytest.mark.timeout(60)
def test_new_points_and_new_runs_are_live_within_two_seconds(tmp_path: Path) -> None:
    """The journal of the training is ahead of the index all the time."""
    folder = tmp_path / "runs"
    train(folder / "first", EVERSTEP_INDEX="off")
    with running_page(folder) as page:
        assert page.get("/api/runs").json["total"] == 1
        run = start(folder / "second", 4, 4, "ask", EVERSTEP_INDEX="off")
        try:
            while "asks at 4" not in run.stdout.readline():
                pass
            row = page.wait_for(lambda: page.get("/api/runs", where="name=second").json["rows"])[0]
            assert row["status"] == "running"
            before = page.get("/api/changes", runs=row["id"]).json
            print(file=run.stdin, flush=True)
            while "asks at 5" not in run.stdout.readline():
                pass
            written = time.time()

            def changed() -> bool:
                now = page.get("/api/changes", runs=row["id"]).json
                return bool(now["version"] > before["version"] and now["sizes"] != before["sizes"])

            page.wait_for(changed)
            assert time.time() - written < 2.0
        finally:
            run.kill()
            run.communicate()
        page.wait_for(lambda: page.get("/api/runs", where="name=second status=killed").json["matched"] == 1)


@pytest.mark.campaign("long")
def test_faults_of_journals_and_index_are_told_until_they_are_mended(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "runs", ignore=shutil.ignore_patterns("everstep.db*"))
    index, away = tmp_path / "runs" / "everstep.db", tmp_path / "away.db"
    journal = segment_path(tmp_path / "runs" / "good", 1)
    journal.write_bytes(journal.read_bytes()[:-1] + b"~more")
    with running_page(tmp_path / "runs") as page:
        (damage,) = page.get("/api/runs").json["problems"]
        assert damage.startswith("good-")
        index.rename(away)
        index.mkdir()
        page.wait_for(lambda: len(page.get("/api/runs").json["problems"]) > 1)
        first, told = page.get("/api/runs").json["problems"]
        assert first == damage and "the page" in told
        index.rmdir()
        away.rename(index)
        page.wait_for(lambda: page.get("/api/runs").json["problems"] == [damage])
