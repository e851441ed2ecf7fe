"""Small inputs that would cost much: files of holes, false frames, filters beyond what SQLite reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from index_runs import written

from everstep.errors import RunIndexError
from everstep.index.database import Database
from everstep.index.readers import id_at
from everstep.index.run_queries import starts
from everstep.index.shipping import sync
from everstep.record import journal_format, read_segment
from everstep.record.segment_file import segment_path
from tiny_runs import Tiny


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
