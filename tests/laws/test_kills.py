"""Law 1, from outside: killed, started again, the run ends equal to the undisturbed run.

In the gate at armed points, in the campaign at random wall times.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from law_support.campaign import SCENARIOS, Campaign
from law_support.forkserver import ForkServer
from law_support.program import Program

SMALL = {"victim": ("--epochs", "2", "--batch", "26", "--every", "2"), "victim_numpy": ("--steps", "15")}
"""Few steps, with several saves, best weights and retention."""

STRIKES = {
    "start-up": ("law.body:5", "journal.create:1"),  # of the second start
    "body": ("law.body:5",),
    "evaluation": ("law.evaluation:2",),
    "tail": ("loop.tail_end:1",),
    "save, before its rename": ("checkpoint.rename:2",),
    "a later save, before its rename": ("checkpoint.rename:3",),
    "journal": ("journal.fsync:3",),
    "retention": ("checkpoint.rmtree:1",),
    "a file of a service": ("sink.rename:4",),
    "shutdown": ("loop.exit:1",),
}
"""Where the starts of a run are killed; rename 1 is that of the checkpoint at step 0."""

KILLS = {
    "loader, 2 workers": ("start-up", "body", "evaluation", "save, before its rename", "retention", "tail"),
    "plain DataLoader": (
        "start-up",
        "body",
        "evaluation",
        "a later save, before its rename",
        "journal",
        "tail",
    ),
    "Supervisor, NumPy": (
        "start-up",
        "body",
        "save, before its rename",
        "a later save, before its rename",
        "retention",
        "shutdown",
    ),
    "Trainer, every service": (
        "start-up",
        "evaluation",
        "save, before its rename",
        "a file of a service",
        "tail",
        "shutdown",
    ),
}


@pytest.mark.parametrize("name", KILLS)
def test_killed_at_armed_points(server: ForkServer, tmp_path: Path, name: str) -> None:
    scenario = SCENARIOS[name]
    options = (*scenario.arguments, *SMALL[scenario.script])

    def program(folder: str) -> Program:
        return Program(server, tmp_path / folder, *options, script=scenario.script)

    undisturbed = program("undisturbed")
    undisturbed.finish()
    for place in KILLS[name]:
        struck = program(place)
        for strike in STRIKES[place]:
            assert struck.run(hazard=f"kill:{strike}") == -9, f"{strike}\n{struck.said()}"
        struck.finish()
        struck.require_equal(undisturbed.run_dir)


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


@pytest.mark.campaign("random")
@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_in_each_phase_it_is_the_run_that_was_never_killed(strike: Strike) -> None:
    strike(uniform=4, per_class=1)
