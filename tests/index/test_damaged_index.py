"""An index or a journal that is damaged, sent or planted: runs are shown, and private ones stay private."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from index_runs import all_runs, everything, indexed, written

import everstep
import warm
from everstep.errors import RunIndexError
from everstep.index import UnwritableIndexError, query
from everstep.index.database import Database
from everstep.index.location import Location, id_at
from everstep.index.run_queries import newest_facts
from everstep.index.shipping import sync
from everstep.labels import labels
from everstep.record import journal_format, read_segment
from everstep.record.journal_format import segment_path
from everstep.views.checkpoint_tables import best_weights
from postgres_server import Server
from tiny_runs import Tiny
from waiting import PATIENCE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three runs of 600 values and their index."""
    for name in ("a", "b", "c"):
        written(tmp_path / name, steps=600)
    sync(Database(tmp_path / "everstep.db"), [tmp_path])
    return tmp_path


def damage(path: Path) -> None:
    """Garbage in all pages but the first: it opens, and whoever reads on is told."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(Random(1).randbytes(size - 4096))


def other_tables(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.executescript("DROP VIEW evaluations; DROP VIEW valid_metrics; DROP TABLE metrics")
    connection.close()


SHORT, NONE = lambda path: os.truncate(path, 3 * 4096 + 17), lambda path: path.write_bytes(b"none" * 3000)


@pytest.mark.parametrize("how", [damage, SHORT, NONE, other_tables])
def test_a_malformed_index_stays_and_the_error_says_what_to_do(folder: Path, how: Any) -> None:
    path = folder / "everstep.db"
    before = everything(path)
    how(path)
    malformed = path.read_bytes()
    with pytest.raises(RunIndexError, match=r"is malformed.*delete it.*run everstep sync"):
        everstep.query("metrics", index=folder)
    assert path.read_bytes() == malformed
    path.unlink()
    assert len(everstep.query("metrics", index=folder)) == 3 * 600 and everything(path) == before


def test_a_fifo_in_the_place_of_an_index_is_no_index(folder: Path) -> None:
    (folder / "everstep.db").unlink()
    os.mkfifo(folder / "everstep.db")
    with pytest.raises(RunIndexError, match="is not a file"):
        everstep.query("runs", index=folder)


def test_a_folder_that_cannot_be_written_is_listed_all_the_same(read_only_dir: Path) -> None:
    user = os.geteuid()
    os.seteuid(os.getuid())
    read_only_dir.chmod(0o755)
    written(read_only_dir / "a")
    read_only_dir.chmod(0o555)
    os.seteuid(user)
    with pytest.warns(RuntimeWarning, match="cannot be made: Permission denied.*the journals in .* are read"):
        assert [run["step"] for run in everstep.query("runs", index=read_only_dir)] == [3]
    assert not (read_only_dir / "everstep.db").exists()


def rollback_file(index: Path, victim: Path) -> bytes:
    """A journal of SQLite without a page, by which SQLite deletes another file: the super-journal."""
    magic, name = bytes.fromhex("d9d505f920a163d7"), os.fsencode(victim)
    header = magic + struct.pack(">IIIII", 0, 0, index.stat().st_size // 4096, 512, 4096)
    page = struct.pack(">I", 0x40000000 // 4096 + 1)
    return header.ljust(512, b"\0") + page + name + struct.pack(">II", len(name), sum(name)) + magic


@pytest.mark.parametrize("through_a_link", [False, True])
def test_a_file_beside_the_index_deletes_nothing(tmp_path: Path, through_a_link: bool) -> None:
    folder = indexed(tmp_path / "sent")
    victim = tmp_path / "precious"
    victim.write_text("precious")
    index = folder / "everstep.db"
    if through_a_link:
        index = index.rename(tmp_path / "elsewhere.db")
        (folder / "everstep.db").symlink_to(index)
    Path(f"{index}-journal").write_bytes(rollback_file(index, victim))
    with pytest.warns(RuntimeWarning, match="-journal is not of everstep.*Move both files away"):
        assert [run["step"] for run in everstep.query("runs", index=folder)] == [3]
    with pytest.raises(UnwritableIndexError, match="-journal is not of everstep"):
        sync(Database(folder / "everstep.db"), [folder])
    assert victim.read_text() == "precious"


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("end", ["-journal", "-wal", "-shm"])
def test_a_fifo_beside_the_index_holds_nobody(tmp_path: Path, end: str) -> None:
    folder = indexed(tmp_path / "sent")
    os.mkfifo(folder / f"everstep.db{end}")
    asked = [sys.executable, "-m", "everstep", "runs", "--index", str(folder)]
    done = warm.run(asked, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and "finished" in done.stdout and f"everstep.db{end} is not" in done.stderr


def test_an_index_in_another_mode_is_brought_back(tmp_path: Path) -> None:
    folder = indexed(tmp_path / "runs")
    connection = sqlite3.connect(folder / "everstep.db")
    assert connection.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)
    connection.close()
    assert len(everstep.query("runs", index=folder)) == 1
    connection = sqlite3.connect(folder / "everstep.db")
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_a_row_that_everstep_does_not_write_is_a_malformed_index(tmp_path: Path) -> None:
    database = Database(indexed(tmp_path / "sent") / "everstep.db")
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE facts SET value = 'not json'")
    with pytest.raises(RunIndexError, match=r"malformed.*a row has"), database.read() as found:
        newest_facts(found)


@pytest.mark.parametrize(("holes", "size"), [(25, 60 << 20), (3000, 1 << 16), (1, 16 << 20)])
def test_a_file_of_holes_is_not_read(tmp_path: Path, holes: int, size: int) -> None:
    run = written(tmp_path / "run")
    with segment_path(run, 2).open("wb") as file:
        for number in range(1, holes + 1):
            file.seek(number * size)
            file.write(b"x" * 4096)
    (problem,) = sync(Database(tmp_path / "everstep.db"), [tmp_path]).problems
    assert "has holes of" in problem


def test_false_frames_cost_little(tmp_path: Path) -> None:
    """Where each one costs the rest of the file again, this does not end."""
    path = segment_path(tmp_path, 1)
    path.parent.mkdir(parents=True)
    path.write_bytes(journal_format.pack_header(1, None) + b"\xe5\x1aEV\0\0\0\0" * 1_000_000)
    assert read_segment(path).torn


def test_the_file_of_a_start_that_is_missing_is_told(tmp_path: Path) -> None:
    """Rows that are not there any more would otherwise be missing without a word."""
    run = tmp_path / "run"
    for epochs in (1, 2):
        Tiny(run, max_epoch=epochs).train()
    segment_path(run, 1).unlink()
    words = "segment-0002.evj continues segment-0001.evj, which is missing: its metrics are not shown"
    (problem,) = sync(Database(tmp_path / "everstep.db"), [tmp_path]).problems
    assert words in problem
    with pytest.warns(RuntimeWarning, match="which is missing"):
        assert words in everstep.runs.show(run).facts["problems"][0]
    segment_path(run, 1).write_bytes(b"")  # as where a copy was cut short
    with pytest.warns(RuntimeWarning, match="of which only 0 bytes are left"):
        assert everstep.runs.show(run).facts["metrics"]


def test_a_damaged_name_in_run_json_is_not_another_run(tmp_path: Path) -> None:
    run = written(tmp_path / "run", id="run-1")
    raw = (run / "run.json").read_bytes()
    assert id_at(run) == "run-1"
    (run / "run.json").write_bytes(raw.replace(b'"id": "run-', b'"id": "ruN-'))
    assert id_at(run) is None


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
        row = "INSERT INTO runs (name, path, created, status, step, epoch) VALUES (?, ?, 1, ?, 0, 0)"
        connection.execute(row, [name, str(path), status])
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
        sync(database, [shared], explicit=False, only=only)
    assert steps(shared) == 3 and names(shared / "everstep.db") == sorted([*before, name])


def test_a_row_in_a_database_sends_no_run(server: Server, tmp_path: Path, monkeypatch: Any) -> None:
    """What `everstep ui URL` does: it refreshes runs that the database has, and sends no other of ./runs."""
    url = server.database()
    written(tmp_path / "runs" / "own", id="own-1")
    sent = written(tmp_path / "runs" / "sent", id="sent-1")
    sync(Database(url), [sent])
    written(sent, steps=2)
    monkeypatch.chdir(tmp_path)
    database, problems = query.open_index(url)
    assert (names(url), problems) == (["sent-1"], []) and [run["step"] for run in all_runs(database)] == [2]
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


def test_a_link_of_another_user_is_not_read(everywhere: Path, private: Path, monkeypatch: Any) -> None:
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
    assert len(sync(Database(shared / "everstep.db"), [shared], explicit=False).problems) == 1
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
    sync(Database(folder / "everstep.db"), [folder], explicit=False)
    assert len(names(folder / "everstep.db")) == 4


def test_labels_and_best_weights_are_not_read_through_a_link(tmp_path: Path) -> None:
    run = written(tmp_path / "sent")
    (tmp_path / "secret" / "id_rsa").mkdir(parents=True)
    (tmp_path / "secret.json").write_text('{"tags": ["secret"], "note": "secret"}')
    (run / "labels.json").symlink_to(tmp_path / "secret.json")
    (run / "best").mkdir()
    (run / "best" / "loss").symlink_to(tmp_path / "secret")
    assert labels(run) == ((), "") and best_weights(run) == []
