"""Pages over real runs, for the tests of the page."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.extend(str(Path(__file__).parent.parent / room) for room in ("index", "record", "services"))

from page_server import Page, running_page

from everstep.record import RunDir


@pytest.fixture(scope="session")
def page(made: Path) -> Iterator[Page]:
    """The page over `made`."""
    with running_page(made) as found:
        yield found


@pytest.fixture(scope="session")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has not trained, for tests that ask who may read."""
    folder = tmp_path_factory.mktemp("begun")
    RunDir.open(folder / "good", about={"id": "good"})
    return folder


@pytest.fixture(scope="session")
def guarded(begun: Path) -> Iterator[Page]:
    """The page over `begun`."""
    with running_page(begun) as found:
        yield found
