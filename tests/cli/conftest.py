"""Runs that the tests of several commands look at."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def made(made: Path) -> Path:
    """The folder in which `runs/` lies, as a command is called there."""
    return made.parent
