"""The step of a run is the last one that its journal knows to be complete, whatever rows there are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from index_runs import all_runs

import everstep
from everstep import Checkpoints, Every
from everstep.index.database import Database
from everstep.index.run_queries import starts
from everstep.index.shipping import ship
from everstep.record import RunJournal
from waiting import until


def stands_at(run_dir: Path) -> int:
    """The step of a run, as the index and the journal have it."""
    database = Database(None)
    ship(database, run_dir)
    with database.read() as connection:
        (run,) = all_runs(connection)
        assert starts(connection, run["id"])[-1]["step"] == run["step"]
    assert RunJournal(run_dir).status().step == run["step"]
    return int(run["step"])


def walk(run_dir: Path, limit: int, inside: Any = lambda step: None) -> None:
    """A Supervisor program with a row each 10 steps and a checkpoint each 20."""
    w = np.zeros(1)
    services = [Checkpoints(Every(steps=20)), everstep.services.Console(sink=lambda line: None)]
    with everstep.Supervisor(run_dir, {"w": w}, max_step=limit, services=services) as sv:
        while not sv.should_stop():
            w += 1
            inside(sv.step + 1)
            sv.advance(**({"loss": 1.0} if (sv.step + 1) % 10 == 0 else {}))


def test_a_run_stands_at_its_last_step_not_at_that_of_its_last_row(tmp_path: Path) -> None:
    walk(tmp_path / "run", 37)
    assert stands_at(tmp_path / "run") == 37


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("killed_at", [21, 25, 39])
def test_a_killed_start_stands_at_least_where_a_resume_would_go_on(tmp_path: Path, killed_at: int) -> None:
    def copy(step: int) -> None:
        if step == killed_at:
            committed = tmp_path / "run" / "checkpoints" / "step-00000020"
            until(committed.exists)
            whole = shutil.ignore_patterns(".tmp-*")  # the writer thread may just be renaming or deleting one
            shutil.copytree(tmp_path / "run", tmp_path / "killed", ignore=whole)

    walk(tmp_path / "run", 45, copy)
    assert stands_at(tmp_path / "killed") == 20
    walk(tmp_path / "killed", 45)
    assert stands_at(tmp_path / "killed") == 45


def test_what_a_resume_takes_back_does_not_count(tmp_path: Path) -> None:
    walk(tmp_path / "run", 33)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000033")
    walk(tmp_path / "run", 25)
    assert len(RunJournal(tmp_path / "run").segments()) == 2
    assert stands_at(tmp_path / "run") == 25
