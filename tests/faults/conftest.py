"""Programs of the laws."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "laws"))

from law_support.forkserver import ForkServer


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """Starts the program."""
    server = ForkServer()
    yield server
    server.close()
