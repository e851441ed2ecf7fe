"""One run and its curves, over real runs: killed and resumed, diverged, forked, with pictures, hostile."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from index_runs import train
from page_server import Page, running_page

import everstep
from everstep.errors import RunIndexError
from everstep.index.database import Database
from everstep.index.run_queries import run_rows, starts
from everstep.index.shipping import sync
from everstep.labels import add_tags, set_note
from everstep.record import Journal, RunDir, RunJournal, accept
from everstep.record.journal_format import GROUP
from everstep.ui.curves import CurveOptions, _thinned, curves

PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)


def id_of(page: Page, name: str) -> str:
    return str(page.get("/api/runs", where=f"name={name}").json["rows"][0]["id"])


def curve(page: Page, run: str, stream: str = "step", metric: str = "loss", **asked: Any) -> dict[str, Any]:
    answer = page.get("/api/series", runs=run, stream=stream, metric=metric, **asked)
    assert answer.status == 200, answer.body
    (found,) = answer.json["series"]
    assert found["run"] == run
    return dict(found)


@pytest.mark.campaign("long")
def test_a_curve_is_the_journal(page: Page, made: Path) -> None:
    run, journal = id_of(page, "long"), RunJournal(made / "long")
    steps, values = journal.series("loss", "step")
    found = curve(page, run)
    assert (found["x"], found["last"]) == (steps, values)
    assert found["min"] == found["max"] == values and found["n"] == 16
    assert "superseded" not in found
    part = curve(page, run, **{"from": 5, "to": 8})
    assert part["x"] == [5, 6, 7, 8] and part["n"] == 4
    timed = curve(page, run, x="time")
    assert timed["last"] == values and timed["x"] == sorted(timed["x"])
    begun = page.get(f"/api/runs/{run}").json["starts"]
    alive = [one["last"] - one["started"] for one in begun]
    assert timed["x"][0] >= 0 and alive[0] < timed["x"][-1] <= sum(alive)
    assert [one["started"] - one["zero"] for one in begun] == pytest.approx([0, alive[0]])
    assert curve(page, run, metric="nothing")["x"] == []


def test_thinning_keeps_the_smallest_and_the_largest() -> None:
    random = np.random.default_rng(1)
    x, values = np.arange(10_000), random.standard_normal(10_000)
    values[[1234, 7777, 5000]] = 50.0, -60.0, math.nan
    found = _thinned(x, values, values, values, 100)
    assert len(found["x"]) == 100 and found["x"][-1] == 9999
    assert max(found["max"]) == 50.0 and min(found["min"]) == -60.0
    assert found["last"][-1] == values[-1]
    for at, low, high in zip(np.split(values, 100), found["min"], found["max"], strict=True):
        assert (np.nanmin(at), np.nanmax(at)) == (low, high)
    uneven = np.concatenate([np.arange(9_900), 100_000 + np.arange(100)])
    assert 2 <= len(_thinned(uneven, values, values, values, 100)["x"]) <= 100
    few = np.array([3.0, 1.0, 2.0])
    assert _thinned(np.array([3, 1, 2]), few, few, few, 5)["x"].tolist() == [1, 2, 3]


Writing = Callable[[Journal], object]


def written(run_dir: Path, *starts: Writing, facts: dict[str, Any] | None = None) -> Path:
    """A run whose starts wrote what no training would; each continues where the one before called `flush`."""
    run, parent = RunDir.open(run_dir), None
    for number, write in enumerate(starts, 1):
        told = {"config": {"name": "<b>bold</b>"}, "resumed_from": parent and "step-00000002"}
        told |= facts or {}
        journal = Journal.open(run.path, number, parent, told, warn=lambda message: None)
        parent = write(journal)
        journal.close()
    return run_dir


def wrote(*blocks: Any, events: Sequence[tuple[str, Any]] = (), then: Sequence[Any] = ()) -> Writing:
    """A start that writes blocks and events, and `then` what the next start supersedes."""

    def write(journal: Journal) -> Any:
        for kind, data in events:
            journal.event(kind, data)
        for each in blocks:
            journal.append(each)
        position = journal.flush()
        for each in then:
            journal.append(each)
        return position

    return write


def block(values: list[float], metric: str = "loss", first: int = 1) -> Any:
    rows = len(values)
    steps = list(range(first, first + rows))
    return everstep.record.Block(0, "step", metric, False, steps, values, [1] * rows, [0] * rows)


def shipped(run: Path) -> tuple[Database, dict[str, Any]]:
    """An index in memory of one run, and its row there."""
    database = Database(None)
    sync(database, [run])
    with database.read() as connection:
        (row,) = run_rows(connection).values()
        return database, row


def sketched_and_whole(run: Path) -> list[Any]:
    """Twenty points of the run's loss as a page asks for them first, and made of all its values."""
    database, row = shipped(run)
    options = [CurveOptions("step", "loss", begin=begin, points=20) for begin in (None, 0)]
    return [curves(database, [row], each)["series"][0] for each in options]


def test_values_that_json_lacks_are_strings_and_markup_is_data(tmp_path: Path) -> None:
    evil = '"></script><script>alert(1)</script>'
    written(tmp_path / "a", wrote(block([1.0, math.nan, math.inf, -math.inf]), block([1.0], evil)))
    with running_page(tmp_path / "a") as page:
        row = page.get("/api/runs", columns=f"loss,{evil}").json["rows"][0]
        assert row["values"] == {"loss": "-Infinity", evil: 1.0}
        found = curve(page, row["id"])
        assert found["last"] == [1.0, "NaN", "Infinity", "-Infinity"]
        assert found["nonfinite"] == [[2, "NaN"], [3, "Infinity"], [4, "-Infinity"]]
        answer = page.get("/api/series", runs=row["id"], stream="step", metric=evil)
        assert answer.json["series"][0]["last"] == [1.0]
        assert answer.headers["content-type"] == "application/json"
        assert page.get(f"/api/runs/{row['id']}").json["facts"]["config"] == {"name": "<b>bold</b>"}
        assert evil in str(page.get("/api/compare", runs=row["id"]).json["streams"])


def test_a_summary_is_a_picture_or_plain_text_and_lies_in_the_run(tmp_path: Path) -> None:
    outside = tmp_path / "secret.png"
    outside.write_bytes(PNG)
    places = {
        "up": "../secret.png", "absolute": str(outside), "linked": "logs/media/link.png",
        "through": "logs/linked/secret.png", "html": "logs/media/page.png", "svg": "logs/media/page.svg",
        "folder": "logs/media", "pipe": "logs/media/pipe.png", "nul": "logs/media/a\0.png", "number": 7,
        "gone": "logs/media/gone.png", "good": "logs/media/good.png",
    }  # fmt: skip
    pictures = {name: {"name": name, "step": 3, "image": {"file": at}} for name, at in places.items()}
    events = [("summary", picture) for picture in pictures.values()]
    text = "<script>alert(1)</script>"
    events += [("summary", {"name": "good", "step": 3, "text": "of the same name"})]
    events += [("summary", {"name": "text", "step": step, "text": text}) for step in (3, 5)]
    run = written(tmp_path / "a", wrote(events=events))
    media = run / "logs" / "media"
    media.mkdir(parents=True)
    (media / "link.png").symlink_to(outside)
    (run / "logs" / "linked").symlink_to(tmp_path)
    (media / "page.png").write_text("<html><script>alert(1)</script>")
    (media / "page.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>")
    os.mkfifo(media / "pipe.png")
    (media / "good.png").write_bytes(PNG)
    with running_page(run) as page:
        at = f"/api/runs/{page.get('/api/runs').json['rows'][0]['id']}"
        summaries = page.get(at).json["summaries"]
        assert {"name": "good", "kind": "image", "steps": [3]} in summaries
        told = {one["name"]: one for one in summaries}
        assert told["good"] == {"name": "good", "kind": "text", "steps": [3]}
        assert told["text"] == {"name": "text", "kind": "text", "steps": [3, 5]}
        answers = {name: page.get(f"{at}/summary", name=name, step=3, kind="image") for name in places}
        assert {name for name, answer in answers.items() if answer.status == 200} == {"good"}
        assert {answer.status for answer in answers.values()} == {200, 404}
        good = answers["good"]
        assert (good.body, good.headers["content-type"]) == (PNG, "image/png")
        same = page.get(f"{at}/summary", name="good", step=3, kind="text")
        assert same.body.decode() == "of the same name"
        words = page.get(f"{at}/summary", name="text", step=5, kind="text")
        assert words.body.decode() == text and words.headers["content-type"] == "text/plain; charset=utf-8"
        for answer in (good, words):
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["content-security-policy"].startswith("default-src 'self'")
        for name, step in (("../../secret.png", 3), ("good", 4), ("", 3)):
            assert page.get(f"{at}/summary", name=name, step=step, kind="image").status == 404


ODD = ["..%2f..%2fetc%2fpasswd", "%2e%2e", "~1/../../x", "~99", "%00", "a%0d%0ab", "<b>"]


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("run", ODD)
def test_a_run_is_named_by_its_id_alone(page: Page, run: str) -> None:
    for path in (f"/api/runs/{run}", f"/api/runs/{run}/log", f"/api/runs/{run}/summary?name=a&step=1"):
        answer = page.ask(path, Cookie=page.cookie)
        assert answer.status == 404 and answer.headers["content-type"] == "application/json"
    for path in (f"/api/series?runs={run}&stream=step&metric=loss", f"/api/compare?runs={run}"):
        assert page.ask(path, Cookie=page.cookie).status == 404


def test_wrong_questions_for_curves_say_what_to_do(page: Page) -> None:
    for asked, told in (
        ({"runs": ""}, "give ids of runs"),
        ({"x": "../x"}, "x is step or time"),
        ({"metric": ""}, "a curve needs a stream and a metric"),
        ({"points": "0"}, "points is an integer from 1"),
        ({"points": "1e9"}, "points is an integer from 1"),
        ({"from": "nan"}, "from is a number"),
        ({"superseded": "2"}, "superseded is 0 or 1"),
        ({"path": "/etc/passwd"}, "no parameter 'path'"),
    ):
        curve = {"runs": id_of(page, "good"), "stream": "step", "metric": "loss", **asked}
        answer = page.get("/api/series", **curve)
        assert answer.status == 400 and told in answer.json["error"]


def test_the_end_of_a_log_is_whole_lines_of_a_file_of_the_run(tmp_path: Path) -> None:
    run = written(tmp_path / "a", wrote())
    log = run / "logs" / "run.log"
    with running_page(run) as page:
        at = f"/api/runs/{page.get('/api/runs').json['rows'][0]['id']}/log"
        assert page.get(at).json == {"text": "", "is_cut": False}
        log.parent.mkdir()
        log.write_bytes(b"one\n\xff\ntw")
        assert page.get(at).json == {"text": "one\n\N{REPLACEMENT CHARACTER}\ntw", "is_cut": False}
        log.write_bytes(b"line\n" * 500_000)
        long = page.get(at).json
        assert long["is_cut"] and 0 < len(long["text"]) <= 1 << 18 and set(long["text"].split()) == {"line"}
        log.unlink()
        log.symlink_to("/etc/passwd")
        assert page.get(at).json == {"text": "", "is_cut": False}


def test_a_divergence_superseded_points_and_a_fork_are_shown(tmp_path: Path) -> None:
    found = {"step": 3, "component": "loss", "old": "1.0", "new": "2.0", "in_data": False}
    events = [("diverged", found), ("verified", {"report": "resume differs"})]
    again = wrote(block([2.0, 2.5], first=3), events=events)
    run = written(tmp_path / "a", wrote(block([4.0, 3.0]), then=[block([1.0, 0.5, 0.25], first=3)]), again)
    name = RunDir.open(run, create=False).id
    written(tmp_path / "b", wrote(), facts={"config": {"lr": 1, "new": True}, "parent": {"run": name}})
    with running_page(tmp_path) as page:
        told = page.get(f"/api/runs/{name}").json
        assert told["diverged"] == 3 and told["starts"][0]["status"] == "killed"
        second = told["starts"][1]
        assert (second["badge"], second["diverged_at"], second["from_step"]) == ("diverged", 3, 2)
        assert second["how"] == "resume differs"
        points = curve(page, name, superseded=1)
        assert (points["x"], points["last"]) == ([1, 2, 3, 4], [4.0, 3.0, 2.0, 2.5])
        assert points["superseded"] == [[3, 1.0], [4, 0.5], [5, 0.25]]
        accept(run, 3)
        page.wait_for(lambda: page.get(f"/api/runs/{name}").json["diverged"] is None)
        starts = page.get(f"/api/runs/{name}").json["starts"]
        assert [one["number"] for one in starts] == [1, 2], "a decision is not a start"
        fork = page.get(f"/api/runs/{id_of(page, 'b')}").json
        assert fork["parent"] == name
        assert {"name": "name", "values": [None, "<b>bold</b>"]} in fork["config_changed"]
        assert {"name": "lr", "values": [1, None]} in fork["config_changed"]


def test_runs_side_by_side_have_their_metrics_and_the_settings_that_differ(tmp_path: Path) -> None:
    """A name of a metric may have a slash and a comma."""
    for name, rate in (("a", 0.1), ("b", 0.2)):
        blocks = [block([1.0], name), block([1.0], "Loss/train"), block([2.0], "a,b")]
        written(tmp_path / name, wrote(*blocks), facts={"config": {"lr": rate, "same": [1]}})
    with running_page(tmp_path) as page:
        found = page.get("/api/compare", runs=f"{id_of(page, 'b')},{id_of(page, 'a')}").json
        assert found["settings"] == [{"name": "config.lr", "values": [0.2, 0.1]}]
        assert found["results"] == [{"name": "Loss/train", "values": [1.0, 1.0]}], found["results"]
        assert [run["name"][0] for run in found["runs"]] == ["b", "a"]
        assert found["streams"] == [{"stream": "step", "metrics": ["Loss/train", "a", "a,b", "b"]}]
        for query in ("columns=a%2Cb&columns=a&columns=name", "columns=a%2Cb&columns=a%2Cname"):
            answer = page.get(f"/api/runs?{query}").json
            assert [column["name"] for column in answer["columns"]] == ["a,b", "a", "name"]


REPORT = ("verified", {"report": "resume verified: 2 steps", "steps": 2})
ENDED = ("closed", {"status": "failed", "reason": "made", "step": 4})


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(("later", "told", "badges"), [
    ([wrote(events=[REPORT])], "verified", ["verified"]),
    ([wrote(block([1.0], first=3), events=[ENDED])], "not verified", ["not verified"]),
    ([wrote(events=[(ENDED[0], {**ENDED[1], "step": 2})])], "nothing to verify", ["nothing to verify"]),
    # The third start tells what the second has done, which was killed.
    ([wrote(), wrote(events=[REPORT])], "not verified", ["not verified", "verified"]),
    ([wrote(events=[REPORT])] * 2, "verified", ["verified", "verified"]),
    ([wrote()], "not verified", ["not verified"]),  # without a lock it may be running
])  # fmt: skip
def test_list_and_page_say_the_same_of_resumes(tmp_path: Path, later: Any, told: Any, badges: Any) -> None:
    run = written(tmp_path / "a", wrote(block([4.0, 3.0]), then=[block([1.0], first=3)]), *later)
    database, row = shipped(run)
    with database.read() as connection:
        found = starts(connection, row["id"])
    assert [start["badge"] for start in found] == ["first", *badges] and row["verified"] == told


def test_tags_and_the_note_of_a_run_are_shown(tmp_path: Path) -> None:
    train(tmp_path / "runs" / "one")
    add_tags(tmp_path / "runs" / "one", ["paper", "<b>"])
    set_note(tmp_path / "runs" / "one", "the old data")
    with running_page(tmp_path / "runs") as page:
        found = page.get(f"/api/runs/{id_of(page, 'one')}").json
        assert (found["tags"], found["note"]) == (["paper", "<b>"], "the old data")
        set_note(tmp_path / "runs" / "one", "the new data")
        page.wait_for(lambda: page.get("/api/runs", where='note="the new data"', columns="note").json["rows"])


@pytest.mark.parametrize("odd", [None, math.inf])
def test_a_curve_of_very_many_rows_is_that_of_all_its_values(tmp_path: Path, odd: float | None) -> None:
    values = np.random.default_rng(1).standard_normal(6000)
    values[[1234, 4777]] = 50.0, -60.0 if odd is None else odd
    parts = [block(values[at : at + 1000].tolist(), first=at + 1) for at in range(0, 6000, 1000)]
    again = block([99.0] * 1000, first=4001)
    run = written(tmp_path / "a", wrote(*parts[:4], then=[again]), wrote(*parts[4:]))
    one, all_of_it = sketched_and_whole(run)
    same = ("n", "n_superseded", "nonfinite") if odd is None else all_of_it.keys()
    for name in same:
        assert np.array_equal(one.get(name), all_of_it.get(name)), name
    assert (one["n"], one["n_superseded"], one["x"][-1], one["last"][-1]) == (6000, 1000, 6000, values[-1])
    for name, extreme in {"max": max, "min": min}.items():
        assert extreme(map(float, one[name])) == extreme(map(float, all_of_it[name]))
    assert len(one["x"]) == 20 and np.abs(one["x"] - all_of_it["x"]).max() <= GROUP
    assert np.array_equal(one["x"], all_of_it["x"]) == (odd is not None), "only finite values are sketched"
    assert np.array_equal(one["last"], values[one["x"] - 1])


def test_a_sketch_that_would_be_too_coarse_is_not_used(tmp_path: Path) -> None:
    few_valid = [wrote(block([0.5] * 300), then=[block([0.5] * 6000, first=301)]), wrote()]
    far_apart = [wrote(block([0.5] * 6000), block([0.5] * 300, first=100_000))]
    no_float64 = [wrote(block([0.5] * 6000)._replace(steps=[1 << 60] * 6000))]
    for number, writings in enumerate((few_valid, far_apart, no_float64)):
        one, all_of_it = sketched_and_whole(written(tmp_path / str(number), *writings))
        assert np.array_equal(one["x"], all_of_it["x"]), number


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(
    "change",
    ["packed = 'text'", "packed = x'00'", "packed = NULL", "segment = 7", "sketch = x'00'", "sketch = NULL"],
)
def test_a_block_that_everstep_does_not_write_is_a_malformed_index(tmp_path: Path, change: str) -> None:
    database = Database(tmp_path / "everstep.db")
    written(tmp_path / "a", wrote(block([1.0, 2.0])))
    sync(database, [tmp_path])
    with database.write() as connection:
        connection.exec_driver_sql("ALTER TABLE blocks RENAME TO strict")
        connection.exec_driver_sql("CREATE TABLE blocks AS SELECT * FROM strict")
        connection.exec_driver_sql(f"UPDATE blocks SET {change}")
    with pytest.raises(RunIndexError, match="a block"):
        curves(database, [{"id": 1, "name": "a"}], CurveOptions("step", "loss"))
