"""The laws in the campaign: a thousand kills and more, in cases of a minute or so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_law1_any_step as any_step
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from law_support.campaign import SCENARIOS, Campaign
from law_support.forkserver import ForkServer
from law_support.points import Points

PARTS = 5
KILLS, IN_BODIES = 20, 9
"""Of each part of a program: all, and those in the body of an epoch."""
SHARDS = 24
"""Cases that share the points of a start."""

pytestmark = [pytest.mark.campaign("random"), pytest.mark.timeout(3600)]


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_hundred_kills_of_each_program(
    server: ForkServer, tmp_path: Path, kill_seed: int, name: str, part: int, tally: Any, record_property: Any
) -> None:
    resumes = ("start-up", "start-up", "start-up")
    phases = (None, "body", *resumes, "body", "tail", "body", "commit", "body", "body", "shutdown")
    campaign = Campaign(server, SCENARIOS[name], tmp_path, kill_seed, phases)
    print(f"{name}: seed {kill_seed}")
    campaign.prepare()
    enough = {"uniform": 1, "per_class": 0, "total": KILLS, "body": IN_BODIES, "start_ups": len(resumes)}
    campaign.until(**enough, first=100 * part + 1, chains=99)  # in each class: test_kills.py
    campaign.report(tally, record_property)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("part", range(8))
def test_crashed_anywhere(kill_seed: int, part: int, tally: Any) -> None:
    crashes = 0

    @seed(100 * kill_seed + part)
    @settings(deadline=None, max_examples=50, database=None)
    @given(data=st.sampled_from(sorted(any_step.DATA)), **any_step.choices)
    def crashed(**chosen: Any) -> None:
        nonlocal crashes
        crashes += any_step.check(**chosen)

    crashed()
    tally("crashes in process", crashes, door="TrainLoop")


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("killed_at", [None, "checkpoint.fsync:14"], ids=["first start", "resumed start"])
def test_killed_at_every_point_every_time(
    server: ForkServer, tmp_path: Path, killed_at: str | None, shard: int, tally: Any
) -> None:
    points = Points(server, tmp_path, killed_at)
    every = [f"{point}:{n}" for point, count in points.counts().items() for n in range(1, count + 1)]
    struck = 0
    for strike in every[shard::SHARDS]:
        run_dir = points.fresh()
        # The threads' race may reach a point less often than when it was traced.
        struck += points.start(run_dir, f"kill:{strike}") == -9
        assert points.start(run_dir) == 0, f"{strike}\n{points.log.read_text()}"
        points.require_exact(run_dir, strike)
        points.require_clean(run_dir, strike)
    tally("crash points", struck, how="SIGKILL", door="TrainLoop", by="points of everstep.hazard")
