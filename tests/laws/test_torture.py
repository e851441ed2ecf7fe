"""`make torture`: the laws with ten times the kills.  `make torture SEED=...` repeats a campaign."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_law1_any_step as any_step
from hypothesis import given, settings
from hypothesis import strategies as st
from law_support.campaign import SCENARIOS, Campaign
from law_support.forkserver import ForkServer
from law_support.points import Points

KILLS = 50
"""Of each program."""

pytestmark = pytest.mark.timeout(3600)


@pytest.mark.parametrize("name", SCENARIOS)
def test_fifty_kills_of_each_program(
    server: ForkServer, tmp_path: Path, kill_seed: int, name: str, record_property: Any
) -> None:
    resumes = ("start-up", "start-up", "start-up")
    phases = (None, *resumes, "commit", *resumes, "tail", None, "shutdown")
    campaign = Campaign(server, SCENARIOS[name], tmp_path, kill_seed, phases)
    print(f"{name}: seed {kill_seed}")
    campaign.prepare()
    campaign.until(uniform=8, per_class=3, total=KILLS, chains=100)
    assert campaign.in_a_row("start-up") >= 3
    record_property("kills", {"scenario": name, "seed": kill_seed, "counts": dict(campaign.counts())})


@settings(deadline=None, max_examples=400)
@given(data=st.sampled_from(sorted(any_step.DATA)), **any_step.choices)
def test_crashed_anywhere(**chosen: Any) -> None:
    any_step.check(**chosen)


@pytest.mark.parametrize("killed_at", [None, "checkpoint.fsync:20"])
def test_killed_at_every_point_every_time(server: ForkServer, tmp_path: Path, killed_at: str | None) -> None:
    points = Points(server, tmp_path, killed_at)
    for point, count in points.counts().items():
        for strike in (f"{point}:{number}" for number in range(1, count + 1)):
            run_dir = points.fresh()
            points.start(run_dir, f"kill:{strike}")
            assert points.start(run_dir) == 0, f"{strike}\n{points.log.read_text()}"
            points.require_exact(run_dir, strike)
            points.require_clean(run_dir, strike)
