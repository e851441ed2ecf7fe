"""Small inputs that would cost much: files of holes, false frames, filters beyond what SQLite reads."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from index_runs import written

from everstep.errors import ConfigError, RunIndexError
from everstep.index.database import Database
from everstep.index.documents import Asked, ask
from everstep.index.filters import parse_json_filter
from everstep.index.mongo import MOST_CONDITIONS, parse
from everstep.index.readers import id_at
from everstep.index.run_queries import starts
from everstep.index.shipping import sync
from everstep.record import journal_format, read_segment
from everstep.record.segment_file import segment_path
from everstep.untrusted_files import open_regular, require_no_hole
from tiny_runs import Tiny
from waiting import PATIENCE


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


def test_a_copy_without_its_zeros_is_read(tmp_path: Path) -> None:
    """As `rsync --sparse` makes it: every second page of the file is a hole."""
    sparse(tmp_path / "copy", 2000, 8192)
    with open_regular(tmp_path / "copy") as file:
        require_no_hole(file)


def test_false_frames_cost_little(tmp_path: Path) -> None:
    """Where each one costs the rest of the file again, this does not end."""
    path = segment_path(tmp_path, 1)
    path.parent.mkdir(parents=True)
    path.write_bytes(journal_format.pack_header(1, None) + b"\xe5\x1aEV\0\0\0\0" * 1_000_000)
    assert len(read_segment(path).problems) == 1


def test_after_a_page_of_damaged_frames_the_true_ones_are_found(tmp_path: Path) -> None:
    """Each frame of the smallest kind is damaged, but for the last one."""
    frame = journal_format.pack_event("x", {}, False, 1.0)
    data, count = bytearray(), 3000
    for _ in range(count):
        data += journal_format.pack_frame(journal_format.EVENT, len(data), frame)
        data[-1] ^= 1
    last = journal_format.pack_frame(journal_format.EVENT, len(data), frame)
    found = list(journal_format.scan(bytes(data + last), 0))
    assert [type(one).__name__ for one in found] == ["Hole", "Frame"]


def asked(where: object) -> int:
    with Database(None).read() as connection:
        return len(ask(connection, "runs", Asked(parse(where))))  # type: ignore[arg-type]


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("field", ["step", "config.a", "valid_loss"])
def test_the_largest_filter_is_answered_and_a_larger_one_refused(field: str) -> None:
    for group in ("$and", "$or"):
        assert asked({group: [{field: {"$gt": 1}}] * MOST_CONDITIONS}) == 0
        with pytest.raises(ConfigError, match=f"more than {MOST_CONDITIONS} conditions"):
            asked({group: [{field: {"$gt": 1}}] * (MOST_CONDITIONS + 1)})
    where: dict[str, object] = {"$gt": 1}
    for _ in range(47):
        where = {"$not": where}
    assert asked({field: where}) == 0


def test_what_sqlite_does_not_read_is_no_fault_of_the_index() -> None:
    with pytest.raises(RunIndexError, match="ask for less") as told, Database(None).read() as connection:
        connection.exec_driver_sql("SELECT " + " + ".join(["1"] * 2000))
    assert "move" not in str(told.value)


def test_a_number_of_5000_digits_is_refused() -> None:
    with pytest.raises(ConfigError, match="digits"):
        parse_json_filter('{"step": %s}' % ("9" * 5000))


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("in_memory", [True, False])
def test_ctrl_c_ends_a_long_statement(tmp_path: Path, in_memory: bool) -> None:
    database = Database(None if in_memory else tmp_path / "everstep.db")
    with database.write():
        pass
    count = (
        "WITH RECURSIVE t(n) AS (SELECT {} UNION ALL SELECT n + 1 FROM t WHERE n < {}) SELECT count(*) FROM t"
    )
    begun = threading.Event()

    def interrupt() -> None:
        begun.wait(PATIENCE)
        os.kill(os.getpid(), signal.SIGINT)

    def take_days() -> None:
        with database.read() as connection:
            raw: Any = connection.connection.driver_connection
            raw.create_function("begun", 0, lambda: begun.set() or 1)
            connection.exec_driver_sql(count.format("begun()", 10**12)).scalar()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        take_days()
    thread.join()
    with database.read() as connection:
        assert connection.exec_driver_sql(count.format(1, 10**5)).scalar() == 10**5


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
    """The whole copy beside it says whose directory it is; the damaged name said that the run was gone."""
    run = Tiny(tmp_path / "run", max_epoch=1).train().run_dir
    name, raw = id_at(run), (run / "run.json").read_bytes()
    (run / "run.json").write_bytes(raw.replace(b'"id": "run-', b'"id": "ruN-'))
    assert raw != (run / "run.json").read_bytes() and id_at(run) == name
    (run / ".run.json").unlink()
    assert id_at(run) == str(name).replace("run-", "ruN-")  # of no whole one, the one that is there
