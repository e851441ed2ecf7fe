"""An index that somebody sent, files beside it, small inputs that would cost much: the runs are shown."""

from __future__ import annotations

import os
import sqlite3
import struct
import sys
from pathlib import Path

import pytest
from index_runs import indexed, written

import everstep
import warm
from everstep.errors import RunIndexError
from everstep.index.database import Database
from everstep.index.readers import id_at
from everstep.index.run_facts import UnwritableIndexError
from everstep.index.run_queries import newest_facts, starts
from everstep.index.shipping import sync
from everstep.record import journal_format, read_segment
from everstep.record.segment_file import segment_path
from tiny_runs import Tiny
from waiting import PATIENCE


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
    with pytest.warns(RuntimeWarning, match=r"-journal is there.*Move both files away and run everstep sync"):
        assert [run["step"] for run in everstep.query("runs", index=folder)] == [3]
    with pytest.raises(UnwritableIndexError, match="-journal is there"):
        sync(Database(folder / "everstep.db"), [folder])
    assert victim.read_text() == "precious"


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("end", ["-journal", "-wal", "-shm"])
def test_a_fifo_beside_the_index_holds_nobody(tmp_path: Path, end: str) -> None:
    folder = indexed(tmp_path / "sent")
    os.mkfifo(folder / f"everstep.db{end}")
    asked = [sys.executable, "-m", "everstep", "runs", "--index", str(folder)]
    done = warm.run(asked, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and "finished" in done.stdout and f"everstep.db{end} is" in done.stderr


def test_an_index_in_another_mode_is_brought_back(tmp_path: Path) -> None:
    folder = indexed(tmp_path / "runs")
    with sqlite3.connect(folder / "everstep.db") as connection:
        assert connection.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)
    connection.close()
    assert len(everstep.query("runs", index=folder)) == 1
    with sqlite3.connect(folder / "everstep.db") as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_a_row_that_everstep_does_not_write_is_a_malformed_index(tmp_path: Path) -> None:
    folder = indexed(tmp_path / "sent")
    database = Database(folder / "everstep.db")
    with sqlite3.connect(folder / "everstep.db") as connection:
        connection.execute("UPDATE facts SET value = 'not json'")
    connection.close()
    with pytest.raises(RunIndexError, match=r"malformed.*a row has"), database.read() as found:
        newest_facts(found)


def sparse(path: Path, holes: int, size: int, between: bytes = b"x" * 4096) -> None:
    with path.open("wb") as file:
        for number in range(1, holes + 1):
            file.seek(number * size)
            file.write(between)


@pytest.mark.parametrize(("holes", "size"), [(25, 60 << 20), (3000, 1 << 16), (1, 16 << 20)])
def test_a_file_of_holes_is_not_read(tmp_path: Path, holes: int, size: int) -> None:
    run = written(tmp_path / "run")
    sparse(segment_path(run, 2), holes, size)
    database = Database(tmp_path / "everstep.db")
    (problem,) = sync(database, [tmp_path]).problems
    assert "has holes of" in problem


def test_false_frames_cost_little(tmp_path: Path) -> None:
    """Where each one costs the rest of the file again, this does not end."""
    path = segment_path(tmp_path, 1)
    path.parent.mkdir(parents=True)
    path.write_bytes(journal_format.pack_header(1, None) + b"\xe5\x1aEV\0\0\0\0" * 1_000_000)
    assert read_segment(path).torn


def test_what_sqlite_does_not_read_is_no_fault_of_the_index(tmp_path: Path) -> None:
    database = Database(None)
    sync(database, [written(tmp_path / "run")])
    with pytest.raises(RunIndexError, match="ask for less") as told, database.read() as connection:
        connection.exec_driver_sql("SELECT " + " + ".join(["1"] * 2000))
    assert "move" not in str(told.value)


def test_the_file_of_a_start_that_is_missing_is_told(tmp_path: Path) -> None:
    """Rows that are not there any more would otherwise be missing without a word."""
    run = tmp_path / "run"
    for epochs in (1, 2):
        Tiny(run, max_epoch=epochs).train()
    segment_path(run, 1).unlink()
    words = "segment-0002.evj continues segment-0001.evj, which is missing: its metrics are not shown"
    (problem,) = sync(Database(tmp_path / "everstep.db"), [tmp_path]).problems
    assert words in problem
    with Database(tmp_path / "everstep.db").read() as connection:
        (start,) = starts(connection, 1)
    assert words in start["problems"][0]


def test_a_damaged_name_in_run_json_is_not_another_run(tmp_path: Path) -> None:
    run = Tiny(tmp_path / "run", max_epoch=1).train().run_dir
    raw = (run / "run.json").read_bytes()
    assert id_at(run) is not None
    (run / "run.json").write_bytes(raw.replace(b'"id": "run-', b'"id": "ruN-'))
    assert id_at(run) is None
