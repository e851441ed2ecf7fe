"""What all tests of replay and diverge share: a folder to work in, and one for temporary files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a folder of the test; return the one where processes make their temporary files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERSTEP_INDEX", "off")
    # torch's loader workers make sockets there, and wait for ever if its path is too long for one
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setenv("TMPDIR", short)
        yield Path(short)
