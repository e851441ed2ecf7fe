"""The fork server, and the table of kills at the end of a test run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from law_support.campaign import table
from law_support.forkserver import ForkServer


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """Starts victims; shared by all tests of one pytest process."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def kill_seed() -> int:
    """The campaign's seed: EVERSTEP_SEED, else a new one every time; failures print it."""
    return int(os.environ.get("EVERSTEP_SEED") or int.from_bytes(os.urandom(4)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    properties = [each for report in terminalreporter.getreports("passed") for each in report.user_properties]
    kills = [value for name, value in properties if name == "kills"]
    if kills:
        seeds = ", ".join(f"{found['scenario']}: {found['seed']}" for found in kills)
        terminalreporter.section("kills after a committed checkpoint, all resumed exactly")
        terminalreporter.write_line(table({found["scenario"]: Counter(found["counts"]) for found in kills}))
        terminalreporter.write_line(f"seeds: {seeds}")
