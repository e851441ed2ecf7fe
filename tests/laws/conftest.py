"""The fork server and the seed of a campaign of kills."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from law_support.forkserver import ForkServer

import gate


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """Starts victims; shared by all tests of one pytest process."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def one_thread() -> None:
    """For runs in this process, which are compared to the bit."""
    torch.set_num_threads(1)


@pytest.fixture
def kill_seed() -> int:
    """The campaign's seed, 0 in the gate."""
    return gate.seed
