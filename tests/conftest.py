"""What all tests share; beside it, `tiny_runs` is importable from every folder of tests."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep import hazard

NOBODY = 65534

os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="everstep-config-")  # no test makes the user's key
atexit.register(shutil.rmtree, os.environ["XDG_CONFIG_HOME"], ignore_errors=True)
os.environ.pop("COLUMNS", None)  # set in the workers of pytest-xdist: tables would be as narrow as a terminal
os.environ.setdefault("EVERSTEP_INDEX", "off")  # thousands of runs need no index; its own tests ask for it

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # started in the background of a shell, which ignores Ctrl-C for it; the tests send it on purpose
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


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


@pytest.fixture(scope="session")
def server() -> Iterator[Any]:
    """A PostgreSQL server that nobody stops, one per process of the tests; see `postgres_server`."""
    from postgres_server import running_server

    with running_server() as found:
        yield found
        assert "terminated by signal" not in found.log.read_text()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    properties = [each for report in terminalreporter.getreports("passed") for each in report.user_properties]
    kills = [value for name, value in properties if name == "kills"]
    if kills:
        # In a run over all tests only the workers have this folder on their path.
        sys.path.insert(0, str(Path(__file__).parent / "laws"))
        from law_support.campaign import table

        seeds = ", ".join(f"{found['scenario']}: {found['seed']}" for found in kills)
        terminalreporter.section("kills after a committed checkpoint, all resumed exactly")
        terminalreporter.write_line(table({found["scenario"]: Counter(found["counts"]) for found in kills}))
        terminalreporter.write_line(f"seeds: {seeds}")
