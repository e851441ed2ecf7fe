"""Each test of a fault runs at each door."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
sys.path.extend(str(TESTS / room) for room in ("laws", "index"))

from faults_support import DOORS, Run  # noqa: E402
from law_support.forkserver import ForkServer  # noqa: E402


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if re.match(r"test_fault_\d\d_", metafunc.definition.originalname):
        metafunc.parametrize("door", DOORS)


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """Starts the program."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def run(server: ForkServer, tmp_path: Path, door: str) -> Run:
    """A run of the program, not begun."""
    return Run(server, tmp_path / "the run", door)


@pytest.fixture
def another(server: ForkServer, tmp_path: Path, door: str) -> Callable[..., Run]:
    """Makes another run of the program behind this door, `another(name, *options)`."""
    return lambda name, *options: Run(server, tmp_path / name, door, *options)


@pytest.fixture(scope="session")
def made_once(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Runs that no test changes, made when they are first asked for: status and hazard of their one start."""
    runs: dict[tuple[object, ...], Run] = {}

    def run_of(door: str, *options: str, status: int = 0, hazard: str | None = None) -> Run:
        key = (door, *options, hazard)
        if key not in runs:
            made = Run(server, tmp_path_factory.mktemp("made once"), door, *options)
            made.ends(status, hazard=hazard)
            runs[key] = made
        return runs[key]

    return run_of


@pytest.fixture
def undisturbed(made_once: Callable[..., Run], door: str) -> Callable[..., Path]:
    """The run directory of the program that nothing befell, with these options."""
    return lambda *options: made_once(door, *options).run_dir


@pytest.fixture
def stopped(made_once: Callable[..., Run], door: str) -> Run:
    """A run that was told to stop in step 14: its checkpoints are of the steps 9, 12 and 14."""
    return made_once(door, status=143, hazard="SIGTERM:faults.body:14")
