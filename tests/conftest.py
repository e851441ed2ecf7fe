"""What all tests share; beside it, `tiny_runs` is importable from every folder of tests."""

from __future__ import annotations

import atexit
import gc
import math
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import gate
from everstep import hazard
from waiting import patient  # noqa: F401, a fixture of each test

NOBODY = 65534
HERE = str(Path(__file__).parent)
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
MEMORY, ROOM = "/dev/shm", 4 * 2**30

if "TMPDIR" not in os.environ and os.access(MEMORY, os.W_OK):
    found = os.statvfs(MEMORY)
    if found.f_bavail * found.f_frsize >= ROOM:
        # Thousands of runs wait for no disk.  TMPDIR=/tmp tests on a disk; nothing here can cut the power.
        # A folder of its own, as processes that tests kill leave files; a short name, as sockets lie there.
        os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="es-", dir=MEMORY)
        os.chmod(tempfile.tempdir, 0o1777)  # some tests start programs as another user
        atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)

os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="everstep-config-")  # no test makes the user's key
atexit.register(shutil.rmtree, os.environ["XDG_CONFIG_HOME"], ignore_errors=True)
for variable in ("COLUMNS", "LINES"):  # set in the workers of pytest-xdist: tables would be as a terminal is
    os.environ.pop(variable, None)
os.environ.setdefault("EVERSTEP_INDEX", "off")  # thousands of runs need no index; its own tests ask for it

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # started in the background of a shell, which ignores Ctrl-C for it; the tests send it on purpose
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--campaign", action="store_true", help="run the campaign, not the gate (tests/gate.py)")
    parser.addoption("--seed", type=int, default=0, help="the campaign's seed")
    parser.addoption("--until", type=float, default=math.inf, help="begin no test after this time")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the tier, before files of tests are imported."""
    try:
        multiprocessing.Lock()
    except OSError as error:  # neither torch's workers nor datasets nor joblib start there
        pytest.exit(f"Python has no semaphores ({error}): mount /dev/shm, of 64 MB or more", returncode=3)
    gate.is_campaign = config.getoption("--campaign")
    if gate.is_campaign:
        gate.seed = config.getoption("--seed")
    else:  # of the workers of pytest-xdist, and of every process that is started
        os.environ.setdefault("PYTHONHASHSEED", "0")
    common = {"database": None, "deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("gate", derandomize=True, **common)
    settings.register_profile("campaign", print_blob=True, **common)
    settings.load_profile("campaign" if gate.is_campaign else "gate")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of which the gate runs nothing."""
    if gate.is_campaign or collection_path.suffix != ".py":
        return None
    return True if gate.is_campaign_only(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:], others = gate.chosen(items)
    config.hook.pytest_deselected(items=others)
    if gate.is_campaign:  # a short campaign tries other files than the one before
        files = sorted({item.path for item in items})
        Random(gate.seed).shuffle(files)
        items.sort(key=lambda item: files.index(item.path))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    return True if time.time() > item.config.getoption("--until") else None


@pytest.fixture(autouse=True, scope="module")
def hidden_from_the_collector() -> None:
    """Hide the million objects that were imported from the garbage collector, and what files before left.

    The collector, and each start that searches this process for modules outside its state, took half a
    second to go over them.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """No hazard, signal handler, folder, environment variable or path of imports outlives its test.

    The next test of this process may be of any file, as the workers share the tests.  So each begins with
    the same random numbers, too.
    """
    for module, seed in (("random", "seed"), ("numpy.random", "seed"), ("torch", "manual_seed")):
        if module in sys.modules:
            getattr(sys.modules[module], seed)(gate.seed)
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    folder, path, environment = os.getcwd(), list(sys.path), dict(os.environ)
    yield
    hazard.arm(None)
    for number, handler in handlers.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)
    os.chdir(folder)
    sys.path[:] = path
    environment["PYTEST_CURRENT_TEST"] = os.environ["PYTEST_CURRENT_TEST"]  # it says "setup", then "teardown"
    if os.environ != environment:
        os.environ.clear()
        os.environ.update(environment)


Tally = Callable[..., None]


def counter(record_property: Callable[[str, object], None]) -> Tally:
    def count(kind: str, n: int = 1, **of: str) -> None:
        record_property("tally", {"kind": kind, "n": n, "of": of})

    return count


@pytest.fixture
def tally(record_property: Callable[[str, object], None]) -> Tally:
    """Count what a test has survived: `tally("kills", 12, phase="body", door="Trainer")`.

    The closing lines of a campaign add up the kinds: "kills", "crash points", "power-cut states",
    "damages", "fuzz inputs".  A test counts after it has seen that nothing is lost, inexact or silent.
    """

    return counter(record_property)


@pytest.fixture
def tally_sample(record_property: Callable[[str, object], None]) -> Tally:
    """Count as `tally`, in a sample of what another test strikes whole; the campaign leaves it out."""
    return counter(record_property)


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


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, for several rooms: good, long, killed, failed and stopped; no test changes them."""
    from index_runs import make_runs  # beside the tests of the index

    folder = tmp_path_factory.mktemp("made") / "runs"
    make_runs(folder)
    return folder


def pytest_terminal_summary(terminalreporter: Any) -> None:
    properties = [each for report in terminalreporter.getreports("passed") for each in report.user_properties]
    counted: dict[str, Counter[str]] = {}
    for found in (value for name, value in properties if name == "tally"):
        for phase in {found["of"].get("phase", "all"), "all"}:
            counted.setdefault(found["kind"], Counter())[phase] += found["n"]
    if counted:
        terminalreporter.section("survived, and exact")
        for kind, phases in counted.items():
            of = ", ".join(f"{phase} {n}" for phase, n in sorted(phases.items()) if phase != "all")
            terminalreporter.write_line(f"{phases['all']} {kind}" + f" ({of})" * bool(of))
