"""Runs that the tests of several commands look at."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `runs/`: good, long, killed, failed and stopped ones; no test changes it."""
    from index_runs import make_runs  # beside the tests of the index: see `cli_runs`

    folder = tmp_path_factory.mktemp("made")
    make_runs(folder / "runs")
    return folder
