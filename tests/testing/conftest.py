"""The suites start hundreds of small runs: where there is memory to write to, they wait for no disk."""

from __future__ import annotations

import os
import tempfile

import pytest


@pytest.fixture(autouse=True)
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.access("/dev/shm", os.W_OK):
        monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
