"""Law 1, from outside: killed, started again, the run ends equal to the undisturbed run.

In the gate at armed points, in the campaign at random wall times.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from law_support.campaign import SCENARIOS, Campaign
from law_support.forkserver import ForkServer
from law_support.program import Program

import gate

SMALL = {"victim": ("--epochs", "2", "--batch", "26", "--every", "2"), "victim_numpy": ("--steps", "15")}
"""Few steps, with several saves, best weights and retention."""

FIRST = ("law.body:5", "journal.create:1", "law.evaluation:1", "loop.tail_end:1")
KILLS = {
    "loader, 2 workers": (FIRST, ("checkpoint.rename:2", "checkpoint.rmtree:1")),
    "plain DataLoader": (FIRST, ("journal.fsync:3", "checkpoint.rename:3")),
    "Supervisor, NumPy": (("law.body:5", "journal.create:1", "checkpoint.rename:2"),
                          ("checkpoint.rename:3", "checkpoint.rmtree:1", "loop.exit:1")),
    "Trainer, every service": (("law.body:5", "journal.create:1", "law.evaluation:2", "loop.tail_end:1"),
                               ("checkpoint.rename:2", "sink.rename:4", "loop.exit:1")),
}  # fmt: skip
"""Runs of a program: where its starts are killed, one after another: in a body, at start-up (a segment is
created), in an evaluation, in the tail, before the rename of a save, in retention, in a service's file, at
shutdown.  Rename 1 of a first start is that of the checkpoint at step 0."""


@pytest.mark.parametrize("name", KILLS)
def test_killed_at_armed_points(server: ForkServer, tmp_path: Path, name: str) -> None:
    scenario = SCENARIOS[name]
    options = (*scenario.arguments, *SMALL[scenario.script])

    def program(folder: str) -> Program:
        return Program(server, tmp_path / folder, *options, script=scenario.script)

    undisturbed = program("undisturbed")
    undisturbed.finish()
    for number, strikes in enumerate(KILLS[name]):
        struck = program(f"{number}")
        for strike in strikes:
            assert struck.run(hazard=f"kill:{strike}") == -9, f"{strike}\n{struck.said()}"
        struck.finish()
        struck.require_equal(undisturbed.run_dir)


PARTS, CHAINS = 5, 2


@pytest.mark.campaign("random")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_in_each_phase_it_is_the_run_that_was_never_killed(
    server, tmp_path, name, part, tally, record_property
):
    print(f"{name}: seed {gate.seed}")
    campaign = Campaign(server, SCENARIOS[name], tmp_path, gate.seed)
    campaign.prepare()
    for number in range(CHAINS * part + 1, CHAINS * (part + 1) + 1):
        campaign.chain(number)
    assert campaign.counts()
    campaign.report(tally, record_property)
