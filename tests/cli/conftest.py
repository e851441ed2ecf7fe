"""Runs that the tests of several commands look at."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def made(made: Path) -> Path:
    """The folder in which `runs/` lies, as a command is called there."""
    return made.parent


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Path:
    """A copy of them for a test that changes something, without an index; beside them is what is no run."""
    shutil.copytree(made / "runs", tmp_path / "runs", ignore=shutil.ignore_patterns("everstep.db*"))
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "notes" / "ideas.txt").write_text("keep")
    return tmp_path


@pytest.fixture
def running(here: Path) -> Iterator[Path]:
    """The same while one more is in the middle of its training."""
    from index_runs import start  # which cli_runs makes importable

    victim = start(here / "runs" / "running", 4, 6, "wait")
    assert "waiting\n" in iter(victim.stdout.readline, "")
    yield here
    victim.kill()
    victim.communicate()
