"""Laws 1 and 4, from outside: killed, or refused by the disk, and started again, it is the undisturbed run.

In the gate at armed points, in the campaign at every I/O operation and at random wall times.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from law_support.campaign import SCENARIOS, Campaign
from law_support.forkserver import ForkServer
from law_support.program import Points, Program

import gate
from everstep.record import RunJournal

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


# ------------------------------------------------------------------------- at every I/O operation

SHARDS = 12
"""Tests that share the points, for pytest-xdist; the gate has the first, and of each point three times."""

STARTS = {
    "first start": (None,),
    "resumed start": ("checkpoint.fsync:14",),
    "first start, live arrays": (None, "--live"),
    "resumed start, live arrays": ("checkpoint.fsync:14", "--live"),
}
"""Which start is struck; the resumed one goes on from a start that was killed inside a commit."""


@pytest.fixture(params=STARTS)
def points(request: pytest.FixtureRequest, server: ForkServer, tmp_path: Path) -> Points:
    return Points(server, tmp_path, *STARTS[request.param])


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_killed_at_every_point(points: Points, shard: int, tally: Any) -> None:
    struck = 0
    strikes = points.strikes(every_time=gate.is_campaign)[shard::SHARDS]
    for strike in strikes:
        program = points.fresh()
        # The threads' race may reach a point less often than when it was traced.
        struck += program.run(hazard=f"kill:{strike}") == -9
        program.finish()
        program.require_equal(points.undisturbed, strike)
    assert struck >= sum(strike.endswith(":1") for strike in strikes) > 0
    tally("crash points", struck, how="SIGKILL", door="TrainLoop", by="points of everstep.hazard")


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_refused_by_the_disk_at_every_point(points: Points, shard: int) -> None:
    """Training goes on, or it ends with an error that says what to do; nothing is lost either way."""
    operations = [strike for strike in points.strikes() if not strike.startswith("loop.")]  # no I/O there
    for number, strike in enumerate(operations[shard::SHARDS]):
        program = points.fresh()
        if program.run(hazard=f"{('ENOSPC', 'EIO')[number % 2]}:{strike}"):
            said = program.said()
            refused = len(program.bodies()) <= 1 and ("RunDirError" in said or "the trial save" in said)
            assert refused or "start again" in said.splitlines()[-1], f"{strike}\n{said}"
            program.finish()
        elif "rmtree" in strike:
            program.finish()  # what was not deleted, or may not be yet, goes at the next start
        program.require_equal(points.undisturbed, strike)


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(
    "operation", [*(f"checkpoint.{of}" for of in ("write", "open", "rename")), "journal.write"]
)
def test_a_disk_that_is_full_for_a_while(server: ForkServer, tmp_path: Path, operation: str) -> None:
    points = Points(server, tmp_path, None)
    first = round(0.4 * points.course().count(operation))
    outage = f"ENOSPC:{operation}:{first}-{first + 2}"  # a refused operation ends its save: three saves fail
    program = points.fresh()
    program.finish(hazard=outage)
    assert "No space left" in program.said()
    program.require_equal(points.undisturbed, outage)


# ------------------------------------------------------------------------- around a rollback

BAD = ("--bad", "7")


def around_the_rollback(course: list[str]) -> list[str]:
    """POINT:COUNT of what is reached from just before the first decision until the run trains again."""
    begin = course.index("loop.rollback") - 2
    end = course.index("journal.create", begin) + 3
    return [f"{course[at]}:{course[: at + 1].count(course[at])}" for at in range(begin, end)]


def go_on(points: Points, program: Program, where: str) -> None:
    while program.run() == 3:
        pass
    program.require_equal(points.undisturbed, where)


ACTIONS = ("kill", "SIGTERM", "ENOSPC")


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("action", ACTIONS)
def test_struck_at_every_fifth_point_around_a_rollback(server, tmp_path: Path, action: str, tally) -> None:
    """In the campaign at each."""
    points = Points(server, tmp_path, None, *BAD)
    undone = RunJournal(points.undisturbed).rollbacks()
    assert len(undone) == 2
    strikes = around_the_rollback(points.course())
    assert 9 < len(strikes) < 99
    struck = 0
    for strike in strikes if gate.is_campaign else strikes[len(action) % 5 :: 5]:
        program = points.fresh()
        status = program.run(hazard=f"{action}:{strike}")
        assert status in {"kill": (-9, 0), "SIGTERM": (143, -15, 0), "ENOSPC": (0, 1)}[action], program.said()
        struck += status != 0
        go_on(points, program, f"{action}:{strike}")
        again = RunJournal(program.run_dir).rollbacks()
        assert [one.batches for one in again] == [one.batches for one in undone]
    kind = {"kill": "crash points", "SIGTERM": "signals", "ENOSPC": "refused operations"}[action]
    tally(kind, struck, door="TrainLoop", by="points of everstep.hazard", how="around a rollback")


@pytest.mark.campaign("long")
@pytest.mark.parametrize("door", ["loop", "supervisor", "trainer"])
def test_at_every_door_over_every_kind_of_data(server: ForkServer, tmp_path: Path, door: str) -> None:
    kinds = {"loop": ("arrays", "plain"), "supervisor": ("own", "loader"), "trainer": ("prefetch", "plain")}
    for kind in kinds[door]:
        folder = tmp_path / kind
        folder.mkdir()
        points = Points(server, folder, None, *BAD, "--door", door, "--data", kind)
        assert len(RunJournal(points.undisturbed).rollbacks()) == 2
        program = points.fresh()
        assert program.run(hazard="kill:loop.rolled_back:2") == -9
        go_on(points, program, kind)
