"""The fork server of the victims."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from law_support.forkserver import ForkServer


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
