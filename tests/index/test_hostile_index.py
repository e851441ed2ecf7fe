"""An index that somebody sent, or files beside an index: nothing is deleted, and the runs are shown."""

from __future__ import annotations

import os
import sqlite3
import struct
import sys
from pathlib import Path

import pytest
from index_runs import indexed

import everstep
import warm
from everstep.index.database import Database
from everstep.index.run_facts import MalformedIndexError, UnwritableIndexError
from everstep.index.run_queries import newest_facts
from everstep.index.shipping import sync
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
    with pytest.raises(MalformedIndexError, match="a row has"), database.read() as found:
        newest_facts(found)
    assert [run["step"] for run in everstep.query("runs", index=folder)] == [3]
