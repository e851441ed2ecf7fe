"""Shipping again sees each change of a run, also one that changes no folder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from everstep.index.database import Database
from everstep.index.run_queries import find_run, newest_facts
from everstep.index.shipping import sync
from everstep.labels import NAMES as LABELS
from everstep.labels import add_tags
from everstep.record import Block, Journal, Position, RunDir, RunLock

Look = Callable[[], dict[str, Any]]


@pytest.fixture
def finished(tmp_path: Path) -> RunDir:
    run = RunDir.open(tmp_path / "run", seed=1)
    with closing(Journal.open(run.path, 1, None, {}, warn=print)) as journal:
        journal.append(Block(1, "step", "loss", False, [1, 2], [0.5, 0.25], [1, 1], [0, 0]))
        journal.event("diverged", {"step": 2})
        journal.event("ended", {"reason": "done", "step": 2})
    return run


@pytest.fixture
def look(finished: RunDir) -> Look:
    """Look, and return what the index has."""
    database = Database(None)

    def looked() -> dict[str, Any]:
        assert sync(database, [finished.path.parent], only=[]).runs == 0
        assert sync(database, [finished.path.parent], named=False).problems == []
        with database.read() as connection:
            found = find_run(connection, finished.id)
            return {**found, "labels": newest_facts(connection, names=LABELS)}

    return looked


def test_a_finished_run_that_is_resumed_in_a_file_that_is_empty_at_first(
    finished: RunDir, look: Look
) -> None:
    assert look()["status"] == "finished"
    lock = RunLock(finished.path)
    lock.acquire()
    try:
        with closing(Journal.open(finished.path, 2, Position(1, 1), {}, warn=print)) as journal:
            assert look()["status"] == "finished"  # the new file has no byte
            journal.append(Block(1, "step", "loss", False, [3], [0.5], [1], [0]))
            journal.flush()
            found = look()
            assert (found["status"], found["step"]) == ("running", 3)
            add_tags(finished.path, ["while-it-runs"])
            assert look()["labels"] == {1: {"tags": ["while-it-runs"]}}
    finally:
        lock.release()
