from __future__ import annotations

from pathlib import Path

import pytest
from installed import built


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the source distribution and the wheel that is built from it."""
    return built(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found
