"""What stores and writers say."""

from __future__ import annotations

import pytest

from waiting import patient  # noqa: F401


@pytest.fixture
def said() -> list[str]:
    """Takes the sentences."""
    return []
