"""Faults 35 to 39: the database of metrics, two processes in one folder, and a start that has changed."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults_support import EVERY, STEPS, Run
from index_runs import index_rows, journal_rows

from everstep.checkpoint.manifest import FORMAT, MANIFEST, packed
from everstep.index.database import Database
from everstep.index.shipping import sync

Tally = Callable[..., None]
Undisturbed = Callable[..., Path]
Another = Callable[..., Run]


def require_all_once(index: Path, run: Run) -> None:
    """The database has every row of the journal once, and nothing is left to be shipped."""
    database = Database(index)
    sync(database, [run.run_dir])
    assert index_rows(database, run.run_dir.name) == journal_rows(run.run_dir)
    assert sync(database, [run.run_dir]).rows == 0


@pytest.fixture
def index(tmp_path: Path) -> Path:
    return tmp_path / "index.db"


@pytest.fixture
def locked(index: Path) -> Iterator[None]:
    """Another program holds the database."""
    holder = sqlite3.connect(index, isolation_level=None)
    holder.execute("PRAGMA journal_mode=WAL")
    holder.execute("BEGIN IMMEDIATE")
    yield
    holder.close()


@pytest.mark.campaign("long")
def test_fault_35_the_database_is_gone_or_locked(
    run: Run, another: Another, undisturbed: Undisturbed, locked: None, index: Path, tally: Tally, door: str
) -> None:
    """The training does not wait for it; the rows are in the journal, and are delivered once."""
    for case, where in ((run, str(index)), (another("gone"), f"postgresql://me@/db?host={index.parent}")):
        said = case.ends(0, EVERSTEP_INDEX=where)
        assert "everstep sync" in said, said
        assert case.last_bodies() == list(range(1, STEPS + 1))
        case.require_equal(undisturbed())
    later = index.with_name("later.db")
    for case in (run, another("gone")):
        require_all_once(later.with_name(f"{case.run_dir.parent.name}.db"), case)
    tally("index outages", 2, fault="35", door=door, error="index")


@pytest.mark.campaign("long")
def test_fault_36_the_database_comes_back_with_half_of_the_rows(
    run: Run, undisturbed: Undisturbed, index: Path, tally: Tally, door: str
) -> None:
    assert run.once(hazard="kill:faults.body:14", EVERSTEP_INDEX=str(index)) == -9
    sync(Database(index), [run.run_dir])
    half = index_rows(Database(index), "run")
    backup = index.with_name("backup.db")
    with sqlite3.connect(index) as source, sqlite3.connect(backup) as target:
        source.backup(target)
    run.ends(0, EVERSTEP_INDEX=str(index))
    whole = journal_rows(run.run_dir)
    assert index_rows(Database(index), "run") == whole and 0 < len(half) < len(whole)
    for path in index.parent.glob("index.db*"):
        path.unlink()
    backup.rename(index)  # the server has lost what came after the kill
    run.ends(0, EVERSTEP_INDEX=str(index))  # a start of the finished run
    require_all_once(index, run)
    run.require_equal(undisturbed())
    tally("kills", 1, fault="36", door=door, phase="body")


@pytest.mark.campaign("long")
def test_fault_37_two_processes_in_one_folder(
    run: Run, another: Another, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    first = run.start("--sleep", "0.05")
    run.wait_for(first, "body", step=EVERY)
    second = another("second")
    second.run_dir = run.run_dir
    before = sorted((run.run_dir / "journal").iterdir())
    said = second.ends(1)
    assert "RunLockedError" in said and str(first.pid) in said, said
    assert second.last_bodies() == [] and sorted((run.run_dir / "journal").iterdir()) == before
    first.kill()
    first.wait(120)
    said = run.ends(0)
    assert f"took over the run from process {first.pid}" in said or "took over the run" in said, said
    run.require_equal(undisturbed())
    tally("kills", 1, fault="37", door=door, phase="body")


CHANGES = {
    ("--batch", "8"): ("16", "8"),
    ("--data", "loader"): ("arrays", "loader"),
    ("--note", "second"): ("first", "second"),
    ("--rate", "0.5"): ("0.01", "0.5"),
    ("--seed", "4"): ("3", "4"),
    ("--features", "9"): ("(16, 8)", "(16, 9)"),
}
"""Options that were not those of the first start, and what the refusal must say."""


@pytest.mark.campaign("long")
def test_fault_38_the_program_or_its_data_has_changed(
    stopped: Run, another: Another, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    run = stopped.copied_to(another("run"))
    before = run.committed()
    for options, (was, now) in CHANGES.items():
        said = run.ends(1, *options)
        error = said[said.rindex("Error: ") :]
        assert was in error and now in error, said
        assert run.last_bodies() == [] and run.committed() == before, said
    run.dies("kill:faults.body:2")
    run.finish()
    run.require_equal(undisturbed())
    tally("kills", 1, fault="38", door=door, phase="body")


@pytest.mark.campaign("long")
def test_fault_39_another_version_of_a_library(
    run: Run, stopped: Run, another: Another, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    """Another torch: the state is restored, and this is said; an unknown format is refused by its number."""
    run.dies("kill:faults.body:14", "--torch", "2.99.0")
    said = run.ends(0)
    assert "computed on another machine, or under other settings" in said and "2.99.0" in said, said
    run.require_equal(undisturbed())
    later = stopped.copied_to(another("later"))
    path = later.newest() / MANIFEST
    body = json.loads(path.read_bytes())["body"]
    kept = path.read_bytes()
    path.write_bytes(packed({**body, "format": FORMAT + 1}))
    said = later.ends(1)
    assert "CheckpointVersionError" in said and str(FORMAT + 1) in said, said
    assert later.last_bodies() == []
    path.write_bytes(kept)
    later.finish()
    later.require_equal(undisturbed())
    tally("kills", 1, fault="39", door=door, phase="body")
