"""Law 1, from outside: SIGKILL at random wall times, start again, end equal to the undisturbed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from law_support.campaign import SCENARIOS, Campaign
from law_support.forkserver import ForkServer


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_killed_run_is_the_run_that_was_never_killed(
    server: ForkServer, tmp_path: Path, kill_seed: int, name: str, record_property: Any
) -> None:
    campaign = Campaign(server, SCENARIOS[name], tmp_path, kill_seed)
    print(f"{name}: seed {kill_seed}")
    campaign.prepare()
    campaign.until(uniform=4, per_class=1)
    record_property("kills", {"scenario": name, "seed": kill_seed, "counts": dict(campaign.counts())})
