"""An index whose file was damaged, deleted in part, or cannot be written: each list is whole, or an error."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from index_runs import everything, index_rows, journal_rows

import everstep
from everstep.errors import RunIndexError
from everstep.index import database
from everstep.index.database import Database
from everstep.index.run_facts import MalformedIndexError
from everstep.index.shipping import sync
from everstep.index.shipping_thread import IndexWriter
from everstep.record import Block, Journal, RunDir

ROWS = 600


def write(run_dir: Path, rows: int = ROWS) -> None:
    """A run whose journal has that many rows, in blocks of 100."""
    run = RunDir.open(run_dir, seed=1)
    journal = Journal.open(run.path, run.next_segment(), None, {})
    for first in range(0, rows, 100):
        steps = list(range(first + 1, first + 101))
        journal.append(
            Block(1, "step", "loss", False, steps, [step / 3 for step in steps], [1] * 100, [0] * 100)
        )
    journal.event("closed", {"status": "finished", "reason": "done"}, wall=True)
    journal.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three runs and their index."""
    for name in ("a", "b", "c"):
        write(tmp_path / name)
    sync(Database(tmp_path / "everstep.db"), [tmp_path])
    return tmp_path


def names(folder: Path) -> list[str]:
    """The runs that a query lists, without their digits."""
    return sorted(run["name"][:-7] for run in everstep.query("runs", index=folder))


def damage(path: Path) -> None:
    """Garbage in all pages but the first: it opens, and whoever reads on is told."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(Random(1).randbytes(size - 4096))


def truncate(path: Path) -> None:
    os.truncate(path, 3 * 4096 + 17)


def no_database(path: Path) -> None:
    path.write_bytes(b"no database" * 1000)


def other_tables(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.executescript("DROP VIEW evaluations; DROP VIEW valid_metrics; DROP TABLE metrics")
    connection.close()


@pytest.mark.parametrize("how", [damage, truncate, no_database, other_tables])
def test_a_malformed_index_is_deleted_and_made_again(folder: Path, how: Callable[[Path], None]) -> None:
    path = folder / "everstep.db"
    before = everything(path)
    how(path)
    with pytest.warns(RuntimeWarning, match=r"was malformed.*and was deleted"):
        assert len(everstep.query("metrics", index=folder)) == 3 * ROWS
    assert everything(path) == before


@pytest.mark.parametrize("how", [damage, no_database])
def test_a_file_with_a_name_of_ones_own_is_left_to_its_owner(
    folder: Path, how: Callable[[Path], None]
) -> None:
    mine = (folder / "everstep.db").rename(folder / "photos.db")
    how(mine)
    before = mine.read_bytes()
    with pytest.raises(RunIndexError, match="not an index of everstep, or is damaged") as caught:
        everstep.query("metrics", index=mine)
    assert not isinstance(caught.value, MalformedIndexError)
    assert mine.read_bytes() == before


def test_what_is_noticed_only_by_a_query_is_mended_too(folder: Path) -> None:
    """The pages of the metrics are not read by a listing."""
    path = folder / "everstep.db"
    connection = sqlite3.connect(path)
    (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'metrics'").fetchone()
    connection.close()
    with path.open("r+b") as file:
        file.seek((root - 1) * 4096)
        file.write(b"\xff" * 4096)
    with pytest.warns(RuntimeWarning, match="was malformed"):
        found = everstep.query("metrics", {"name": "loss"}, index=folder)
    assert len(found) == 3 * ROWS


def test_a_training_notices_and_ships_its_rows(folder: Path) -> None:
    path = folder / "everstep.db"
    write(folder / "d")
    damage(path)
    said: list[str] = []
    IndexWriter(path, folder / "d", lambda: True, said.append).close()
    (line,) = said
    assert line.startswith("warning: the index") and "was malformed" in line
    assert index_rows(Database(path), "d") == journal_rows(folder / "d")


def test_a_fifo_in_the_place_of_an_index_is_no_index(folder: Path) -> None:
    (folder / "everstep.db").unlink()
    os.mkfifo(folder / "everstep.db")
    with pytest.raises(RunIndexError, match="is not a file"):
        everstep.query("runs", index=folder)


def test_a_folder_that_cannot_be_written_is_listed_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "everstep.db").unlink()

    def refuse(path: Path, *rest: Any) -> Any:
        if path.parent == folder and "rwc" in rest:
            raise PermissionError(13, "Permission denied", str(path))
        return engine(path, *rest)

    engine = database._sqlite
    monkeypatch.setattr(database, "_sqlite", refuse)
    with pytest.warns(RuntimeWarning, match="cannot be made: Permission denied.*the journals in .* are read"):
        assert names(folder) == ["a", "b", "c"]
    assert not (folder / "everstep.db").exists()
