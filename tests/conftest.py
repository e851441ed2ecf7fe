"""What all tests share; beside it, `tiny_runs` is importable from every folder of tests."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep import hazard

NOBODY = 65534

os.environ.setdefault("EVERSTEP_INDEX", "off")  # thousands of runs need no index; its own tests ask for it

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # started in the background of a shell, which ignores Ctrl-C for it; the tests send it on purpose
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    """No hazard outlives the test that armed it."""
    yield
    hazard.arm(None)


@pytest.fixture
def read_only_dir() -> Iterator[Path]:
    """A folder that this process may not write into; root becomes somebody else for the test."""
    outer = Path(tempfile.mkdtemp())
    outer.chmod(0o755)
    folder = outer / "folder"
    folder.mkdir()
    folder.chmod(0o555)
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(NOBODY)
    try:
        yield folder
    finally:
        if was_root:
            os.seteuid(0)
        folder.chmod(0o755)
        shutil.rmtree(outer)
