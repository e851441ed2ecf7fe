"""An index whose file was damaged, deleted in part, or cannot be written: each list is whole, or an error."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from index_runs import everything

import everstep
from everstep.errors import RunIndexError
from everstep.index import database
from everstep.index.database import Database
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
def test_a_malformed_index_is_left_as_it_is_and_the_error_says_what_to_do(
    folder: Path, how: Callable[[Path], None]
) -> None:
    path = folder / "everstep.db"
    before = everything(path)
    how(path)
    malformed = path.read_bytes()
    with pytest.raises(RunIndexError, match=r"is malformed.*delete it.*run everstep sync"):
        everstep.query("metrics", index=folder)
    assert path.read_bytes() == malformed
    path.unlink()
    assert len(everstep.query("metrics", index=folder)) == 3 * ROWS
    assert everything(path) == before


def test_a_training_with_a_malformed_index_warns_once(folder: Path) -> None:
    damage(folder / "everstep.db")
    said: list[str] = []
    writer = IndexWriter(folder / "everstep.db", folder / "a", lambda: True, said.append)
    writer._ship(0.0)
    writer.close()
    (line,) = said
    assert line.startswith("warning: the index") and "delete it" in line and "The training continues" in line


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
