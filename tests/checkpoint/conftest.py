"""What stores and writers say."""

from __future__ import annotations

import pytest


@pytest.fixture
def said() -> list[str]:
    """Takes the sentences."""
    return []
