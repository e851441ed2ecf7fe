"""A private run stays where it is, whatever rows and links somebody else has made; whose run has a name."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from index_runs import all_runs, indexed, written

import everstep
from everstep.index import query
from everstep.index.database import Database
from everstep.index.location import Location
from everstep.index.shipping import sync
from everstep.labels import labels
from everstep.views.checkpoint_tables import best_weights
from postgres_server import Server

NOBODY = 65534


@pytest.fixture
def everywhere() -> Iterator[Path]:
    """A folder that everybody may read; those of pytest are private."""
    folder = Path(tempfile.mkdtemp(prefix="everstep-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def private(everywhere: Path) -> Path:
    """A run that only its owner may read."""
    run = written(everywhere / "private" / "run", id="secret-1")
    (everywhere / "private").chmod(0o700)
    return run


def insert(folder: Path, path: Path, name: str, status: str) -> None:
    """Write a row as anybody can who may write the index."""
    with sqlite3.connect(folder / "everstep.db") as connection:
        connection.execute(
            "INSERT INTO runs (name, path, created, status, step, epoch) VALUES (?, ?, 1, ?, 0, 0)",
            [name, str(path), status],
        )
    connection.close()


def names(place: Location) -> list[str]:
    return sorted(run["name"] for run in all_runs(Database(place)))


def steps(folder: Path) -> int:
    """How many values the index has."""
    return len(everstep.query("metrics", index=folder))


@pytest.mark.parametrize("name", ["x", "secret-1"])
def test_a_row_ships_no_run(everywhere: Path, private: Path, name: str) -> None:
    shared = indexed(everywhere / "shared")
    before = names(shared / "everstep.db")
    insert(shared, private, name, "running")
    assert steps(shared) == 3
    database = Database(shared / "everstep.db")
    for only in (None, [private]):
        sync(database, [shared], named=False, only=only)
    assert steps(shared) == 3
    assert names(shared / "everstep.db") == sorted([*before, name])


def test_a_row_in_a_database_ships_no_run_and_the_page_sends_none(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `everstep ui URL` does: it refreshes runs that the database has, and sends no other of ./runs."""
    url = server.database()
    written(tmp_path / "runs" / "own", id="own-1")
    sent = written(tmp_path / "runs" / "sent", id="sent-1")
    sync(Database(url), [sent])
    written(sent, steps=2)
    monkeypatch.chdir(tmp_path)
    database, problems = query.open_index(url)
    assert (names(url), problems) == (["sent-1"], [])
    assert [run["step"] for run in all_runs(database)] == [2]
    sync(database, [tmp_path / "runs"])  # a person has named the folder
    assert names(url) == ["own-1", "sent-1"]


def give_to_nobody(link: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a link to another user; as only root may, else let the system say that it is that user's."""
    if os.geteuid() == 0:
        os.lchown(link, NOBODY, NOBODY)
        return
    lstat = os.lstat

    def of_nobody(path: Any, **options: Any) -> os.stat_result:
        found = lstat(path, **options)
        return os.stat_result([*found[:4], NOBODY, *found[5:10]]) if Path(path) == link else found

    monkeypatch.setattr(os, "lstat", of_nobody)


def test_a_link_of_another_user_to_a_run_is_not_read(
    everywhere: Path, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = indexed(everywhere / "shared")
    (shared / "planted").symlink_to(private)
    give_to_nobody(shared / "planted", monkeypatch)
    with pytest.warns(RuntimeWarning, match="not made by you or that run's owner, and is not read"):
        assert len(everstep.query("runs", index=shared)) == 1
    (problem,) = sync(Database(shared / "everstep.db"), [shared]).problems
    assert "give the run itself to everstep sync" in problem
    (shared / "planted").unlink()
    (shared / "own").symlink_to(private)  # as to a scratch disk
    assert len(everstep.query("runs", index=shared)) == 2


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("part", ["journal", "journal/segment-0001.evj"])
def test_no_part_of_a_run_is_read_through_a_link(tmp_path: Path, part: str) -> None:
    written(tmp_path / "private" / "run", id="secret-1")
    shared = indexed(tmp_path / "shared")
    sent = written(shared / "sent", id="sent-1")
    if (sent / part).is_dir():
        shutil.rmtree(sent / part)
    (sent / part).unlink(missing_ok=True)
    (sent / part).symlink_to(tmp_path / "private" / "run" / part)
    with pytest.warns(RuntimeWarning, match=r"is a link|is not a regular file"):
        assert len(everstep.query("runs", index=shared)) == 1
    database = Database(shared / "everstep.db")
    assert len(sync(database, [shared], named=False).problems) == 1
    assert len(names(shared / "everstep.db")) == 1


def test_only_its_maker_can_read_an_index(everywhere: Path) -> None:
    folder = everywhere / "runs"
    written(folder / "open")
    sync(Database(folder / "everstep.db"), [folder])
    assert stat.S_IMODE((folder / "everstep.db").stat().st_mode) == 0o600
    (folder / "everstep.db").chmod(0o644)
    written(folder / "second")
    with pytest.warns(RuntimeWarning, match="which others can read; everstep sync .*second puts it there"):
        assert len(everstep.query("runs", index=folder)) == 1
    assert sync(Database(folder / "everstep.db"), [folder / "second"]).problems == []
    written(folder / "second", steps=5)
    assert sorted(found["step"] for found in everstep.query("runs", index=folder)) == [3, 5]
    assert stat.S_IMODE((folder / "everstep.db").stat().st_mode) == 0o644


def test_runs_in_a_folder_that_is_a_run_itself_are_found(tmp_path: Path) -> None:
    folder = indexed(tmp_path / "runs")
    shutil.copy(written(tmp_path / "other") / "run.json", folder / "run.json")
    written(folder / "evaluations")
    assert len(everstep.query("runs", index=folder)) == 3
    written(folder / "later")
    sync(Database(folder / "everstep.db"), [folder], named=False)
    assert len(names(folder / "everstep.db")) == 4


def test_labels_and_best_weights_are_not_read_through_a_link(tmp_path: Path) -> None:
    run = written(tmp_path / "sent")
    (tmp_path / "secret" / "id_rsa").mkdir(parents=True)
    (tmp_path / "secret.json").write_text('{"tags": ["secret"], "note": "secret"}')
    (run / "labels.json").symlink_to(tmp_path / "secret.json")
    (run / "best").mkdir()
    (run / "best" / "loss").symlink_to(tmp_path / "secret")
    assert labels(run) == ((), "")
    assert best_weights(run) == []
