"""What all tests share; beside it, `tiny_runs` is importable from every folder of tests."""

from __future__ import annotations

import atexit
import gc
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

import tiers
from everstep import hazard

NOBODY = 65534
HERE = str(Path(__file__).parent)
MEMORY, ROOM = "/dev/shm", 4 * 2**30

if "TMPDIR" not in os.environ and os.access(MEMORY, os.W_OK):
    found = os.statvfs(MEMORY)
    if found.f_bavail * found.f_frsize >= ROOM:
        # Thousands of runs wait for no disk.  TMPDIR=/tmp tests on a disk; nothing here can cut the power.
        os.environ["TMPDIR"] = tempfile.tempdir = MEMORY

os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="everstep-config-")  # no test makes the user's key
atexit.register(shutil.rmtree, os.environ["XDG_CONFIG_HOME"], ignore_errors=True)
os.environ.pop("COLUMNS", None)  # set in the workers of pytest-xdist: tables would be as narrow as a terminal
os.environ.setdefault("EVERSTEP_INDEX", "off")  # thousands of runs need no index; its own tests ask for it

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # started in the background of a shell, which ignores Ctrl-C for it; the tests send it on purpose
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    definition = metafunc.definition
    if tiers.TIERS.get(os.path.relpath(definition.path, HERE), {}).get(definition.name) == tiers.SHARE:
        metafunc.fixturenames.append("extent")
        metafunc.parametrize("extent", [tiers.SHARE, tiers.WHOLE], indirect=True)


@pytest.fixture
def extent(request: pytest.FixtureRequest) -> Iterator[None]:
    """How far the loop of a test goes that has a share in `make test`; see `tiers`."""
    tiers.share_for(request.node.nodeid if request.param == tiers.SHARE else None)
    yield
    tiers.share_for(None)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.place(items, HERE)


def pytest_collection_finish() -> None:
    """Hide the million objects that were imported from the garbage collector.

    The collector, and each start that searches this process for modules outside its state, took half a
    second to go over them.
    """
    gc.collect()
    gc.freeze()


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
    terminalreporter.write_line(
        f"EVERSTEP_SEED={tiers.today()} chose the cases whose turn it was (tests/tiers.py)"
    )
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
