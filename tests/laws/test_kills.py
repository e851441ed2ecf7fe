"""Law 1, from outside: SIGKILL at random wall times, start again, end equal to the undisturbed run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from law_support.campaign import SCENARIOS, Campaign
from law_support.forkserver import ForkServer

pytestmark = pytest.mark.campaign("random")

SHORT = ("loader, 2 workers", "plain DataLoader", "Supervisor, NumPy", "Trainer, every service")


Strike = Callable[..., None]


@pytest.fixture
def strike(
    server: ForkServer, tmp_path: Path, kill_seed: int, name: str, tally: Any, record_property: Any
) -> Strike:
    """Kills the scenario until so many kills counted, and counts them for the closing table."""

    def until(**enough: int) -> None:
        print(f"{name}: seed {kill_seed}")
        campaign = Campaign(server, SCENARIOS[name], tmp_path, kill_seed)
        campaign.prepare()
        campaign.until(**enough)
        campaign.report(tally, record_property)

    return until


@pytest.mark.parametrize("name", SHORT)
def test_a_killed_run_is_the_run_that_was_never_killed(strike: Strike) -> None:
    strike(uniform=1, per_class=0, total=2)


@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_in_each_phase_it_is_the_run_that_was_never_killed(strike: Strike) -> None:
    strike(uniform=4, per_class=1)
